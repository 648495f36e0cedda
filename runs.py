"""
What train.py, sample.py, bench.py and analyze.py share: the device, and runs on disk. A run is a folder with

    ckpt.pt      all that is needed to go on: a dict of CONTENT, `optimizer` and `scaler`
    best.pt      the same without these two, at the lowest validation loss
    log.jsonl    a line with all settings at the start and at every resume; one per log and per evaluation
"""
import contextlib
import ctypes
import json
import math
import os
import zipfile
from dataclasses import fields
from pathlib import Path

import torch

import lime
from data import prepare
from data.prepare import UserError

CONTENT = dict(format=int, step=int, best=float, skipped=int, tokenizer=str, data=str, config=dict,
               settings=dict, model=dict)      # of a checkpoint; ckpt.pt has optimizer and scaler as well

def keep_freed_memory():
    """Let glibc keep what is freed: what it gives back, the system clears anew at every step, 0.1 to 0.2 s of
    processor time of a step of 1.2 s (`tiny` with GPT-2 tokens). Other C libraries do as they like."""
    with contextlib.suppress(AttributeError, OSError, TypeError):        # not glibc
        for option in -1, -3:                                            # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(option, 2**31 - 1)                 # bytes

def pick_device(name, dtype="auto", keep_freed=True):
    """(torch.device, torch.dtype) that the flags ask for. UserError if this machine lacks them."""
    have = ["cpu"] + ["mps"] * torch.backends.mps.is_available()
    if torch.cuda.is_available():
        have = [f"cuda:{i}" for i in range(torch.cuda.device_count())] + have
    name = {"auto": have[-1] if have[0] == "cpu" else have[0], "cuda": "cuda:0"}.get(name, name)
    if name not in have:
        raise UserError(f"--device={name} is not on this machine, which has {', '.join(have)}")
    kind = name.split(":")[0]
    if kind == "cpu" and keep_freed:
        keep_freed_memory()
    fits = {"cpu": ["float32", "bfloat16"], "mps": ["float32"], "cuda": ["float16", "float32"]}[kind]
    if kind == "cuda" and torch.cuda.is_bf16_supported():
        fits = ["bfloat16"] + fits
    if dtype not in fits + ["auto"]:
        raise UserError(f"--dtype={dtype} does not fit {name}, expected {' or '.join(sorted(fits))}")
    return torch.device(name), getattr(torch, fits[0] if dtype == "auto" else dtype)

def all_runs():
    """The folders under out/ with a checkpoint, the one written last at the end."""
    return [str(p.parent) for p in sorted(Path("out").rglob("ckpt.pt"), key=lambda p: p.stat().st_mtime)]

def newest_run():
    """The folder under out/ whose checkpoint was written last. UserError if there is none."""
    if not all_runs():
        raise UserError(f"there is no run under {Path('out').absolute()}; make one: python train.py")
    return all_runs()[-1]

def new_run(out_dir, variant):
    """The folder of a new run. Without out_dir, two runs that start together get two."""
    path = Path(out_dir or "out")
    try:
        path.mkdir(parents=True, exist_ok=True)
        for n in range(1, 10 ** 6) if not out_dir else ():
            with contextlib.suppress(FileExistsError):
                path = Path("out", f"{variant}-{n}" if n > 1 else variant)
                path.mkdir()
                break
        return path
    except OSError as e:
        raise UserError(f"the run's folder {path} can't be made: {e.strerror}; take another --out_dir")

def expect(fine, reason):
    if not fine:
        raise ValueError(reason)

def same_fields(cls, saved):
    expect({f.name: f.type for f in fields(cls)} == {k: type(v) for k, v in saved.items()},
           f"its settings are not those of this version's {cls.__name__}")

def load_run(path, check=lambda ckpt, model: None):
    """A checkpoint: a dict of CONTENT, on the CPU. Only tensors and plain types are read, so that no file can
    run code. UserError with path and reason for what is damaged, foreign, or does not fit lime.py, or where
    check(checkpoint, its model) raises."""
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as file:                      # torch.load ignores the file's own checksums
            expect(not file.testzip(), "it is damaged")
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        expect(isinstance(ckpt, dict) and ckpt.get("format") == 1, "it is not a checkpoint of this version")
        for key, kind in CONTENT.items():
            expect(isinstance(ckpt.get(key), kind), f"its {key} is missing or wrong")
        same_fields(lime.Config, ckpt["config"])
        with torch.device("meta"):
            model = lime.LIMe(lime.Config(**ckpt["config"]))
        # dict(): torch would note `assign` in the state's metadata and assign again at the real load
        model.load_state_dict(dict(ckpt["model"]), assign=True)
        expect(all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters()),
               "its weights are not all finite float32 numbers")
        check(ckpt, model)
        return ckpt
    except (FileNotFoundError, NotADirectoryError):
        there = ", ".join(sorted(all_runs())) or "none"
        raise UserError(f"{path} is not there; under out: {there}; a new one: python train.py") from None
    except Exception as e:                                       # whatever its bytes make the loaders raise
        if type(e).__name__ in ("UnpicklingError", "BadZipFile"):        # their texts don't help
            e = "it is damaged, or holds more than tensors and plain types"
        size = f"{path.stat().st_size:,} bytes" if path.is_file() else "not a file"
        raise UserError(f"{path} ({size}) can't be used: {e}"[:400]) from None

def load_model(path, device):
    """(checkpoint, its model, on the device and ready to evaluate); errors as in load_run."""
    ckpt = load_run(path)
    model = lime.LIMe(lime.Config(**ckpt["config"]))
    model.load_state_dict(ckpt["model"])
    return ckpt, model.to(device).eval()

def best_loss(out_dir):
    """The validation loss of best.pt, inf without it; after a kill it may be newer than ckpt.pt."""
    path = Path(out_dir, "best.pt")
    try:
        return load_run(path)["best"] if path.exists() else math.inf
    except UserError as e:
        raise UserError(f"{e}; delete it, and --resume goes on from ckpt.pt") from None

def save(path, state):
    """Write a checkpoint under another name, flush it, rename it: `path` is always whole, old or new."""
    part = path.with_name(path.name + ".part")
    try:
        weights = sum(p.nbytes for p in state.get("model", {}).values())    # AdamW keeps twice as much
        prepare.check_disk(path.parent, weights * (3 if "optimizer" in state else 1))
        with open(part, "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError, UserError) as e:              # torch.save: a full disk is a RuntimeError
        part.unlink(missing_ok=True)
        raise UserError(f"{path} was not saved ({e}); any earlier one is kept: make room, --resume") from None

def read_log(path):
    """The lines of a log.jsonl, dicts with a step, without what a kill has cut; none if it is not there."""
    for text in path.read_text("utf-8", "replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                yield line

def open_log(path, head, ckpt):
    """log.jsonl, open to append: `head` is in it, on resume after the old lines up to the checkpoint. Also
    whether the evaluation of the checkpoint's step is among these."""
    lines = [line for line in read_log(path) if line["step"] <= ckpt["step"]] if ckpt else []
    evaluated = any(line["step"] == head["step"] and line.get("kind") == "eval" for line in lines)
    part = path.with_name(path.name + ".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in [*lines, head]), "utf-8")
    os.replace(part, path)
    return open(path, "a", encoding="utf-8", buffering=1), evaluated
