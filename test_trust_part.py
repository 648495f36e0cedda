"""More tests of train.py and sample.py; their fixtures are those of test_lime.py, where this is to go."""
import functools
import gc
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lime
import sample
import train
from data import prepare
from data.prepare import UserError
from test_lime import HERE, TINY, fit, lines, refused, text_set  # noqa: F401

VARIANTS = list(lime.VARIANTS)


def weights(run):
    return torch.load(Path(run, "ckpt.pt"), weights_only=True)["model"]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


def script(name, *argv, cwd, python=(), **kwargs):
    """`python NAME ARGV` as a process of its own."""
    return subprocess.run([sys.executable, *python, str(HERE / name), *map(str, argv)], cwd=cwd, text=True,
                          capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1",
                                                    **kwargs.pop("env", {})}, **kwargs)


# ---- runs and their files

def test_runs_that_start_together_get_folders_of_their_own(tmp_path, monkeypatch):
    """Catches a second run that takes the folder of a first one that has not saved yet."""
    monkeypatch.chdir(tmp_path)
    names = [train.new_run(train.Settings(), "static").name for _ in range(3)]
    assert names == ["static", "static-2", "static-3"]


def test_stop_saves_and_goes_on_exactly(fit, capsys):
    """Catches a stop that loses its step or exits with 0, and a resumed run that drifts from a whole one."""
    class Stop(list):
        """A signal that comes in the third update."""
        calls = 0

        def __len__(self):
            self.calls += 1
            return int(self.calls >= 3)
    fit("whole", "--variant=kv", "--eval_interval=2")
    with pytest.raises(SystemExit) as e:
        fit("broken", "--variant=kv", stop=Stop([signal.SIGTERM]))
    assert e.value.code == 143 and "saved at step 3" in capsys.readouterr().err
    train.main(["--resume", "--out_dir=broken", "--eval_interval=0"])
    assert equal(weights("whole"), weights("broken"))


def test_log_cut_by_a_kill(fit):
    """Catches a resume that dies on half a line of log.jsonl, keeps it, or writes a line twice."""
    run = fit("run", "--max_iters=4")
    with open(run / "log.jsonl", "ab") as f:
        f.write(b'{"kind": "train", "step": 9, "settings": {"a": 1}\n\xff\xfe{}\n[]\n{"kind": "train", "st')
    train.main(["--resume", "--out_dir=run", "--max_iters=6"])
    assert [x["step"] for x in lines(run, "train")] == [1, 2, 3, 4, 5, 6]
    assert [x["step"] for x in lines(run, "eval")] == [0, 3, 4, 6] and len(lines(run, "resume")) == 1


def test_an_evaluation_that_is_not_finite_stops_the_run(fit, capsys, monkeypatch):
    """Catches a good checkpoint replaced by weights whose validation loss is not a number."""
    losses = iter([5.0, float("nan")])
    monkeypatch.setattr(train, "evaluate", lambda *a: next(losses))
    refused(capsys, lambda: fit("run"), "validation loss nan", "step 3")
    assert torch.load("run/ckpt.pt", weights_only=True)["step"] == 0


def test_no_room_is_said_before_writing(fit, capsys, monkeypatch):
    """Catches a save that fills the disk instead of asking first how much is free."""
    run = fit("run")
    good = (run / "ckpt.pt").read_bytes()
    state = torch.load(run / "ckpt.pt", weights_only=True)
    free = SimpleNamespace(free=80_000)                          # room for the weights, not for AdamW's
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    refused(capsys, lambda: train.save(run / "ckpt.pt", state), "not saved", "free", "kept")
    assert (run / "ckpt.pt").read_bytes() == good and len(list(run.iterdir())) == 3


def test_checkpoints_that_would_be_half_loaded(fit, capsys):
    """Catches a resume with another model's optimizer, weights alone or NaN, and torch's advice to trust."""
    run = fit("run")
    state = torch.load(run / "ckpt.pt", weights_only=True)
    first = next(iter(state["model"]))
    half = {k: v for k, v in state.items() if k not in ("optimizer", "scaler")}
    moments = {i: {k: v.flatten()[:1] if v.ndim else v for k, v in x.items()}
               for i, x in state["optimizer"]["state"].items()}
    nan, double = (dict(state["model"], **{first: x}) for x in (state["model"][first] * math.nan,
                                                                state["model"][first].double()))
    for bad, word in ((half, "weights alone"),
                      (dict(state, optimizer=dict(state["optimizer"], state=moments)), "optimizer"),
                      (dict(state, optimizer=dict(state["optimizer"], param_groups=[])), "param"),
                      (dict(state, model=nan), "finite"), (dict(state, model=double), "float32"),
                      (dict(state, step="6"), "step"),
                      (dict(state, extra=Path("x")), "plain types")):
        torch.save(bad, run / "ckpt.pt")
        refused(capsys, lambda: train.main(["--resume", "--out_dir=run"]), "ckpt.pt", word)


def test_a_folder_that_can_not_be_written(fit, capsys):
    """Catches a traceback where the run's folder can't be made: /proc refuses even root."""
    if not Path("/proc/self").exists():
        pytest.skip("needs /proc")
    refused(capsys, lambda: fit("/proc/run"), "/proc/run", "--out_dir")


def test_compiled_and_plain_are_interchangeable(fit, monkeypatch):
    """Catches _orig_mod. in a checkpoint's names, and a compiled run that can't go on without --compile."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    fit("run", "--compile", "--max_iters=3")
    assert not any("_orig_mod" in k for k in weights("run"))
    train.main(["--resume", "--out_dir=run", "--max_iters=4", "--compile=false"])
    train.main(["--resume", "--out_dir=run", "--max_iters=5", "--compile"])
    assert torch.load("run/ckpt.pt", weights_only=True)["step"] == 5


def test_compile_that_fails_is_a_warning(fit, capsys, monkeypatch):
    """Catches a run that dies where there is no compiler."""
    monkeypatch.setattr(torch, "compile", lambda model: lambda *a: 1 / 0)
    fit("run", "--compile")
    assert "going on without it" in capsys.readouterr().err and len(lines(Path("run"), "train")) == 6


# ---- training

def test_the_graph_of_a_step_does_not_outlive_it(fit, monkeypatch):
    """Catches two graphs at once in memory, because the loss of the step before is still held."""
    real, losses = lime.LIMe.forward, []

    def forward(self, idx, targets=None, trace=None):
        gc.collect()
        assert all(loss() is None for loss in losses)
        out = real(self, idx, targets, trace)
        if torch.is_grad_enabled():
            def hook(grad):                                      # lives as long as the graph does
                pass
            out[1].register_hook(hook)
            losses.append(weakref.ref(hook))
            del hook
        return out
    monkeypatch.setattr(lime.LIMe, "forward", forward)
    fit("run", "--gradient_accumulation_steps=2")
    assert len(losses) == 12


def test_sizes_are_checked_before_data_are_prepared(capsys, tmp_path, monkeypatch):
    """Catches seconds of preparing, or files, before a size that can't be is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "prepared", lambda: [])
    monkeypatch.setattr(prepare, "prepare_pydocs", lambda: pytest.fail("data prepared"))
    for flags, word in (("--n_head=3", "n_embd"), ("--vocab_size=-1", "vocab_size"),
                        ("--n_layer=0", "n_layer"),
                        ("--beta1=2 --eval_iters=-1", "--beta1=2.0, expected 0 to 0.9999999; --eval_")):
        refused(capsys, lambda: train.main(flags.split()), word)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", [True, False])
def test_default_data_name_the_better_ones(there, text_set, tmp_path, monkeypatch, capsys):
    """Catches a default run that does not say how to get FineWeb-Edu, or prepares again what is there."""
    monkeypatch.chdir(tmp_path)
    calls, real = [], prepare.load
    monkeypatch.setattr(prepare, "prepared", lambda: ["pydocs"] * there)
    monkeypatch.setattr(prepare, "prepare_pydocs", lambda: calls.append(1))
    monkeypatch.setattr(prepare, "load", lambda name, *a, **k: real(str(text_set), *a, **k))
    train.main([*TINY, "--eval_interval=0"])
    assert "python data/prepare.py fineweb_edu" in capsys.readouterr().out and len(calls) == (not there)
    assert Path("out/static/ckpt.pt").exists()


# ---- sampling

def test_sample_extremes(fit, capsys):
    """Catches a temperature so small that logits overflow, and line ends of a prompt file that change."""
    fit("out/run")
    capsys.readouterr()
    sample.main(["--temperature=0", "--max_new_tokens=9", "--start=a"])
    greedy = capsys.readouterr().out
    sample.main(["--temperature=1e-45", "--max_new_tokens=9", "--start=a"])
    assert capsys.readouterr().out == greedy
    Path("prompt.txt").write_bytes("a\r\nb\u00e9".encode())
    sample.main(["--start=FILE:prompt.txt", "--max_new_tokens=1"])
    assert capsys.readouterr().out.startswith("a\r\nb\u00e9")
    Path("prompt.txt").write_bytes(b"\xff")
    refused(capsys, lambda: sample.main(["--start=FILE:prompt.txt"]), "not a UTF-8 text")


# ---- processes

def test_optimised_python_checks_as_well(text_set, tmp_path):
    """Catches checks made with assert, which python -O leaves out, and files written before a check."""
    done = script("train.py", f"--dataset={text_set}", "--batch_size=0", "--seed=-1", cwd=tmp_path,
                  python=["-O"])
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "--batch_size=0" in done.stderr
    assert "--seed=-1" in done.stderr and not list(tmp_path.iterdir())


def test_console_that_knows_ascii_alone(fit, tmp_path):
    """Catches a traceback for a character that the console lacks."""
    fit("out/run")
    done = script("sample.py", "--start=caf\u00e9", "--max_new_tokens=3", cwd=tmp_path,
                  env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"})
    assert done.returncode == 0 and "Traceback" not in done.stderr and "caf\\xe9" in done.stdout


@pytest.mark.slow
def test_reader_that_goes_away(fit, tmp_path):
    """Catches a traceback when the text goes into `head`."""
    fit("out/run")
    process = subprocess.Popen([sys.executable, HERE / "sample.py", "--max_new_tokens=100000"], cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(5)
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read() and process.wait(60) == 0
    process.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_kill_at_any_moment(variant, text_set, tmp_path):
    """Catches a kill that leaves no whole checkpoint, or a resumed run whose weights differ in any bit."""
    flags = [*TINY, f"--variant={variant}", f"--dataset={text_set}", "--gradient_accumulation_steps=2",
             "--max_iters=150", "--eval_interval=7"]
    assert script("train.py", *flags, "--out_dir=whole", cwd=tmp_path).returncode == 0
    process = subprocess.Popen([sys.executable, HERE / "train.py", *flags, "--out_dir=broken"], cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while "step      1/" not in process.stdout.readline():
        pass
    time.sleep(random.Random(variant).random() * 0.3)
    process.kill()
    process.stdout.close()
    assert process.wait() == -9
    done = script("train.py", "--resume", "--out_dir=broken", "--eval_interval=11", cwd=tmp_path)
    assert done.returncode == 0 and equal(weights(tmp_path / "whole"), weights(tmp_path / "broken"))
    whole, broken = (lines(tmp_path / name, "train") for name in ("whole", "broken"))
    assert [(x["step"], x["loss"]) for x in whole] == [(x["step"], x["loss"]) for x in broken]
    assert {p.name for p in (tmp_path / "broken").iterdir()} == {"ckpt.pt", "best.pt", "log.jsonl"}


@pytest.mark.slow
def test_second_signal_stops_at_once(text_set, tmp_path):
    """Catches a user who has to wait for the end of a long step."""
    process = subprocess.Popen(
        [sys.executable, HERE / "train.py", *TINY, f"--dataset={text_set}", "--out_dir=run",
         "--max_iters=1000", "--gradient_accumulation_steps=100000"], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while b"step      0/" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=5)
    assert process.returncode == 130 and err == b""


@pytest.mark.slow
def test_full_disk(text_set, tmp_path):
    """Catches a write that fails half-way and takes the old checkpoint along, or leaves a stray file."""
    flags = [*TINY, f"--dataset={text_set}", "--out_dir=run"]
    assert script("train.py", *flags, cwd=tmp_path).returncode == 0
    good = (tmp_path / "run/ckpt.pt").read_bytes()
    done = script("train.py", "--resume", "--out_dir=run", "--max_iters=9", cwd=tmp_path,
                  preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "not saved" in done.stderr, done.stderr
    assert (tmp_path / "run/ckpt.pt").read_bytes() == good and not list(tmp_path.glob("run/*.part"))
    done = script("train.py", "--resume", "--out_dir=run", "--max_iters=9", cwd=tmp_path)
    assert done.returncode == 0 and lines(tmp_path / "run", "train")[-1]["step"] == 9


TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29561"]


@pytest.mark.slow
def test_a_failing_process_ends_all(text_set, tmp_path):
    """Catches processes that wait for ever for one that failed, and a batch that can't be divided."""
    flags = [*TINY, f"--dataset={text_set}", "--out_dir=run"]
    done = script("train.py", *flags, cwd=tmp_path, python=TORCHRUN, timeout=60)
    assert done.returncode != 0 and "multiple of the 2 processes" in done.stderr
    (tmp_path / "one.py").write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "import train\n"
        "from data import prepare\n"
        "real = train.batch\n"
        "def batch(*a):\n"
        "    if os.environ['RANK'] == '1': raise prepare.UserError('rank 1 is broken')\n"
        "    return real(*a)\n"
        "train.batch = batch\n"
        "prepare.run(lambda: train.main(sys.argv[1:]))\n")
    done = subprocess.run([sys.executable, *TORCHRUN, "one.py", *flags, "--gradient_accumulation_steps=2"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "rank 1 is broken" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dynamic", "kv", "hc"])
def test_two_processes_for_every_variant(variant, text_set, tmp_path):
    """Catches a variant with a parameter that DistributedDataParallel waits for in vain."""
    flags = [*TINY, f"--variant={variant}", f"--dataset={text_set}", "--gradient_accumulation_steps=4"]
    for name, python in (("one", []), ("two", TORCHRUN)):
        done = script("train.py", *flags, f"--out_dir={name}", cwd=tmp_path, python=python, timeout=90)
        assert done.returncode == 0, done.stderr
    one, two = lines(tmp_path / "one", "train"), lines(tmp_path / "two", "train")
    assert len(one) == len(two) == 6 and all(abs(a["loss"] - b["loss"]) < 1e-5 for a, b in zip(one, two))


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2 ** 20


@pytest.mark.slow
def test_long_runs_stay_flat(fit, monkeypatch):
    """Catches memory that grows by the step or the token, and a token that costs more the later it comes."""
    real, seen = train.schedule, []

    def schedule(step, s):
        if step in (500, 4999):
            seen.append(resident())
        return real(step, s)
    monkeypatch.setattr(train, "schedule", schedule)
    run = fit("run", "--max_iters=5000", "--eval_interval=1000", "--log_interval=1000")
    assert seen[1] - seen[0] < 10, seen
    model = lime.LIMe(lime.Config(**train.load_run(run / "ckpt.pt")["config"]))
    memory, times = [], []
    for i, _ in enumerate(model.generate(torch.tensor([[256]]), 20_000)):
        if i % 2000 == 1999:
            memory.append(resident())
            times.append(time.process_time())
    took = [b - a for a, b in zip(times, times[1:])]
    assert memory[-1] - memory[0] < 10 and max(took[-3:]) < 2 * min(took[:3]), (memory, took)
