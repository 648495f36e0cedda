"""
Train a model of lime.py. No flag is needed: it picks the device, makes a small data set if there is none,
trains the preset `tiny` in minutes, and leaves out/<run>/ with ckpt.pt (all that is needed to go on),
best.pt (the weights with the lowest validation loss) and log.jsonl.

    python train.py --variant=dynamic --seed=1            every field of Settings and of lime.Config is a flag
    python train.py --resume                              the newest run goes on after a stop or a kill
    torchrun --nproc_per_node=4 train.py --preset=small   several GPUs
"""
import contextlib
import json
import math
import os
import platform
import shutil
import signal
import sys
import time
import zipfile
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import lime
from data import prepare
from data.prepare import UserError


@dataclass
class Settings:
    preset: str = ""               # sizes and recipe, a key of PRESETS; default: tiny, on a GPU mostly small
    dataset: str = ""              # name under data/, or folder; default: fineweb_edu if there, else pydocs
    out_dir: str = ""              # the run's folder; default: out/VARIANT, or out/VARIANT-2, ... if taken
    resume: bool = False           # go on with the run in out_dir, by default the newest
    max_iters: int = 0             # updates; 0: the preset's (tiny with GPT-2 tokens: a quarter of it)
    batch_size: int = 8            # sequences in a forward pass
    gradient_accumulation_steps: int = 1  # forward passes in an update, of all processes together
    learning_rate: float = 3e-3    # peak of the schedule
    router_lr: float = 1e-2        # peak for the routers
    min_lr: float = 0.0            # end of the cosine (the routers' end is in proportion)
    warmup_iters: int = 40         # updates of linear warm-up
    weight_decay: float = 0.1      # of matrices; embedding, norms and static routers have none
    beta1: float = 0.9             # AdamW's
    beta2: float = 0.95            # AdamW's
    grad_clip: float = 1.0         # largest norm of the gradient; 0: off
    eval_interval: int = 100       # updates between evaluations, which also save; 0: only at the end
    eval_iters: int = 20           # batches in an evaluation, the same windows in every run; 0: no evaluation
    log_interval: int = 10         # updates between lines; 0: off
    seed: int = 1                  # of the first weights and of the order of the data
    device: str = "auto"           # cpu, cuda, cuda:1, mps; auto: the best there is
    dtype: str = "auto"            # of matrix products: float32, bfloat16, float16; auto: bfloat16 on a GPU
    compile: bool = False          # torch.compile the whole model: a minute's wait, then faster on a GPU


# What each preset of lime.PRESETS sets here. deep* and paper: the paper's table 3, in 64 parts.
PAPER = dict(max_iters=5000, batch_size=16, gradient_accumulation_steps=64, learning_rate=1e-3,
             warmup_iters=200)
PRESETS = {
    "tiny": dict(max_iters=400),
    "small": dict(max_iters=750, batch_size=16, gradient_accumulation_steps=8, learning_rate=1e-3,
                  warmup_iters=75),
    "deep32": PAPER, "deep64": PAPER, "deep128": PAPER,
    "paper": dict(PAPER, max_iters=20000),
}
# A resumed run may change these; anything else would be another run.
MAY_CHANGE = set("max_iters learning_rate router_lr min_lr eval_interval eval_iters log_interval device "
                 "dtype compile dataset out_dir resume".split())


# -----------------------------------------------------------------------------------------------------------
# settings

def check(s):
    """Raise UserError that names every number out of its range (no assert: python -O checks as well)."""
    least = dict(batch_size=1, gradient_accumulation_steps=1, **{k: 0 for k in (
        "max_iters learning_rate router_lr min_lr warmup_iters weight_decay beta1 beta2 grad_clip "
        "eval_interval eval_iters log_interval seed").split()})
    most = dict(beta1=0.9999999, beta2=0.9999999, seed=2 ** 63 - 1, min_lr=s.learning_rate)
    for k, low in least.items():
        high = most.get(k, 10 ** 12)
        if not low <= getattr(s, k) <= high:
            raise UserError(f"--{k}={getattr(s, k)}, expected {low} to {high}")
    if s.learning_rate == 0:
        raise UserError("--learning_rate=0.0, expected above 0")


def pick_device(name, dtype="auto"):
    """(torch.device, torch.dtype) that the flags ask for. UserError if this machine lacks them."""
    have = ["cpu"] + ["mps"] * torch.backends.mps.is_available()
    if torch.cuda.is_available():
        have = [f"cuda:{i}" for i in range(torch.cuda.device_count())] + have
    name = {"auto": have[-1] if have[0] == "cpu" else have[0], "cuda": "cuda:0"}.get(name, name)
    if name not in have:
        raise UserError(f"--device={name} is not on this machine, which has {', '.join(have)}")
    kind = name.split(":")[0]
    fits = {"cpu": ["float32", "bfloat16"], "mps": ["float32"], "cuda": ["float16", "float32"]}[kind]
    if kind == "cuda" and torch.cuda.is_bf16_supported():
        fits = ["bfloat16"] + fits
    if dtype not in fits + ["auto"]:
        raise UserError(f"--dtype={dtype} does not fit {name}, expected {' or '.join(sorted(fits))}")
    return torch.device(name), getattr(torch, fits[0] if dtype == "auto" else dtype)


def parse(argv):
    """(Settings, lime.Config, checkpoint to resume or None). Flags override the resumed run, or else
    the preset, or else the defaults of the two classes."""
    parser = prepare.Parser(description=__doc__)
    parser.add_fields(Settings)
    parser.add_fields(lime.Config)
    parser.set_defaults(vocab_size=0)                            # 0: the tokenizer's
    first, ckpt = parser.parse_known_args([a for a in argv if a not in ("-h", "--help")])[0], None
    if first.resume:
        first.out_dir = first.out_dir or newest_run()
        ckpt = load_run(Path(first.out_dir, "ckpt.pt"))
        saved = {**ckpt["settings"], **ckpt["config"], "out_dir": first.out_dir, "resume": True}
        parser.set_defaults(**saved)
    else:
        dataset = first.dataset or ("fineweb_edu" if "fineweb_edu" in prepare.prepared() else "pydocs")
        on_gpu = pick_device(first.device)[0].type == "cuda"
        preset = first.preset or ("small" if on_gpu and dataset != "pydocs" else "tiny")
        if preset not in PRESETS:
            raise UserError(f"--preset={preset}, expected one of {', '.join(PRESETS)}")
        parser.set_defaults(**{**lime.PRESETS[preset], **PRESETS[preset], "dataset": dataset,
                               "preset": preset, "vocab_size": 0, "max_iters": 0})
    args = vars(parser.parse_args(argv))
    s = Settings(**{f.name: args[f.name] for f in fields(Settings)})
    cfg = lime.Config(**{f.name: args[f.name] for f in fields(lime.Config)})
    check(s)
    try:
        lime.check(replace(cfg, vocab_size=cfg.vocab_size or 1))
    except ValueError as e:
        raise UserError(e) from None
    differ = [f"--{k}={v} (was {saved[k]})" for k, v in args.items()
              if ckpt and k not in MAY_CHANGE and v != saved[k]]
    if differ:
        raise UserError(f"{s.out_dir} can't go on with {', '.join(differ)}: drop these, or --resume")
    return s, cfg, ckpt


# -----------------------------------------------------------------------------------------------------------
# runs on disk

def newest_run():
    """The folder under out/ whose checkpoint was written last. UserError if there is none."""
    runs = sorted(Path("out").glob("*/ckpt.pt"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise UserError(f"there is no run under {Path('out').absolute()}; make one: python train.py")
    return str(runs[-1].parent)


def load_run(path):
    """A checkpoint: a dict with model, config, settings, step, tokenizer, data (ckpt.pt: optimizer, scaler).
    Only tensors and plain types are read, so that no file can run code. UserError with path and reason
    for what is damaged, foreign, or does not fit lime.py as it is."""
    path = Path(path)
    try:
        if zipfile.ZipFile(path).testzip():                      # torch.load does not check the checksums
            raise ValueError("the file is damaged")
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(ckpt, dict) or ckpt.get("format") != 1:
            raise ValueError("it is not a checkpoint of this version")
        for cls, saved in ((lime.Config, ckpt["config"]), (Settings, ckpt["settings"])):
            if {f.name: f.type for f in fields(cls)} != {k: type(v) for k, v in saved.items()}:
                raise ValueError(f"its settings are not those of this version's {cls.__name__}")
        with torch.device("meta"):
            model = lime.LIMe(lime.Config(**ckpt["config"]))
        # dict(): torch would note `assign` in the state's metadata and assign again at the real load
        model.load_state_dict(dict(ckpt["model"]), assign=True)
        return ckpt
    except FileNotFoundError:
        raise UserError(f"{path} is not there; make it: python train.py --out_dir={path.parent}") from None
    except Exception as e:                                       # whatever its bytes make the loaders raise
        size = path.stat().st_size
        raise UserError(f"{path} ({size:,} bytes) can't be used: {e}"[:300]) from None


def save(path, state):
    """Write a checkpoint under another name, flush it, rename it: `path` is always whole, old or new."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as e:                         # torch.save makes a full disk a RuntimeError
        part.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free / 1e6
        raise UserError(f"{path} not saved ({e}; {free:,.0f} MB free), the last is kept: make room, --resume")


def open_log(path, head, step):
    """log.jsonl, open to append: `head` first; on resume, after the lines up to `step`. Also returns
    whether an evaluation at that step is in it."""
    lines = [head]
    if step is not None and path.exists():
        old = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.endswith("}")]
        lines = [line for line in old if line["step"] <= step] + [head]
    part = path.with_name(path.name + ".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    os.replace(part, path)
    evaluated = any(line["kind"] == "eval" and line["step"] == step for line in lines)
    return open(path, "a", encoding="utf-8", buffering=1), evaluated


# -----------------------------------------------------------------------------------------------------------
# training

def param_groups(model, s):
    """AdamW's groups, as in table 3 of the paper: routers have a rate of their own; matrices decay, but not
    the embedding, nor the tables of static and kv routers and of Hyper-Connections."""
    groups = {}
    for name, p in model.named_parameters():
        router, table = name.endswith(("memory.R", "memory.W")), name.endswith(("embed", "memory.R", ".A"))
        groups.setdefault((router, p.ndim >= 2 and not table), []).append(p)
    return [dict(params=params, lr=s.router_lr if router else s.learning_rate,
                 weight_decay=s.weight_decay * decay)
            for (router, decay), params in groups.items()]


def schedule(step, s):
    """The rate of update `step` (0, 1, ...) over its peak: linear warm-up, then a cosine down to min_lr."""
    if step < s.warmup_iters:
        return (step + 1) / s.warmup_iters
    low, done = s.min_lr / s.learning_rate, (step - s.warmup_iters) / max(1, s.max_iters - s.warmup_iters)
    return low + (1 - low) * (1 + math.cos(math.pi * done)) / 2


def batch(split, starts, block_size, device):
    """Inputs and targets (B, T), the windows at `starts`."""
    ids = torch.from_numpy(np.stack([split.window(i, block_size + 1) for i in starts]))
    ids = ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids.to(device)
    return ids[:, :-1], ids[:, 1:]


@torch.no_grad()
def evaluate(model, split, s, device, autocast):
    """Validation loss, nats per token: the mean over windows spread evenly, the same ones for every run."""
    block_size = model.cfg.block_size
    starts = np.linspace(0, len(split) - block_size - 1, s.eval_iters * s.batch_size).astype(int)
    with autocast():
        losses = [model(*batch(split, some, block_size, device))[1].item()
                  for some in np.split(starts, s.eval_iters)]
    return sum(losses) / len(losses)


def compiled(model, example):
    """The model compiled as a whole, or with one warning as it is where torch.compile fails."""
    try:
        faster = torch.compile(model)
        faster(*example)[1].backward()
        model.zero_grad()
        return faster
    except Exception as e:
        print(f"--compile failed ({type(e).__name__}), going on without it", file=sys.stderr, flush=True)
        return model


def main(argv, stop=()):
    """One run. `stop` is where a signal's number appears when the run is to end early."""
    s, cfg, ckpt = parse(argv)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device, dtype = pick_device(s.device, s.dtype)
    if s.gradient_accumulation_steps % world:
        raise UserError(f"--gradient_accumulation_steps={s.gradient_accumulation_steps}, expected a multiple "
                        f"of the {world} processes")
    if s.dataset == "pydocs" and rank == 0:
        print("data: the documentation inside Python; for FineWeb-Edu: python data/prepare.py fineweb_edu")
        if "pydocs" not in prepare.prepared():
            prepare.prepare_pydocs()
    data = prepare.load(s.dataset, cfg.block_size, vocab_size=cfg.vocab_size)
    cfg.vocab_size = cfg.vocab_size or data.vocab_size
    quarter = (s.preset, data.tokenizer) == ("tiny", "gpt2")
    s.max_iters = s.max_iters or PRESETS[s.preset]["max_iters"] // (4 if quarter else 1)
    step0 = ckpt["step"] if ckpt else 0
    if ckpt and ckpt["data"] != data.fingerprint:
        raise UserError(f"{s.dataset} is not the data of {s.out_dir}; prepare that, or begin anew")
    if ckpt and step0 >= s.max_iters:
        return print(f"{s.out_dir} is already at step {step0} of {s.max_iters}")
    if world > 1:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    names = [Path("out", cfg.variant + i) for i in ["", *(f"-{n}" for n in range(2, 1000))]]
    out = Path(s.out_dir) if s.out_dir else next(path for path in names if not path.exists())
    if not ckpt and (out / "ckpt.pt").exists():
        raise UserError(f"{out} holds a run: go on with it (--resume), or take another --out_dir")

    torch.manual_seed(s.seed)
    raw = lime.LIMe(cfg).to(device)
    optimizer = torch.optim.AdamW(param_groups(raw, s), betas=(s.beta1, s.beta2), fused=device.type != "mps")
    peaks = [group["lr"] for group in optimizer.param_groups]
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run = dict(format=1, step=0, best=math.inf, skipped=0, tokenizer=data.tokenizer, data=data.fingerprint,
               config=asdict(cfg), settings=asdict(s))
    if ckpt:
        raw.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        scaler.load_state_dict(ckpt["scaler"])
        run.update(step=step0, best=ckpt["best"], skipped=ckpt["skipped"])

    def autocast():
        return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    def checkpoint():
        if rank == 0:
            save(out / "ckpt.pt", dict(run, model=raw.state_dict(), optimizer=optimizer.state_dict(),
                                       scaler=scaler.state_dict()))
    model = raw
    if s.compile:
        with autocast():
            model = compiled(raw, batch(data.train, [0] * s.batch_size, cfg.block_size, device))
    if world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    if rank == 0:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"the run's folder {out} can't be made: {e.strerror}; take another --out_dir") from None
        flops = 6 * lime.forward_flops(cfg, cfg.block_size) // cfg.block_size
        head = dict(kind="resume" if ckpt else "run", step=step0, settings=run["settings"],
                    config=run["config"], device=str(device), dtype=str(dtype), parameters=lime.n_params(raw),
                    flops_per_token=flops, processes=world, threads=torch.get_num_threads(), data=data.meta,
                    python=platform.python_version(), torch=torch.__version__)
        log, evaluated = open_log(out / "log.jsonl", head, step0 if ckpt else None)
        print(f"{out}: {cfg.variant}, {head['parameters']:,} parameters, {device}, {str(dtype)[6:]}; "
              f"{s.dataset}: {len(data.train):,} tokens ({data.tokenizer}) to train on, "
              f"{len(data.val):,} to validate", flush=True)

    tokens = s.batch_size * s.gradient_accumulation_steps * cfg.block_size              # in an update
    began = since = time.perf_counter()
    for step in range(step0, s.max_iters + 1):
        last = step == s.max_iters
        if last or (s.eval_interval and step % s.eval_interval == 0):
            if rank == 0 and s.eval_iters and not (step == step0 and evaluated):
                pause = time.perf_counter()
                loss, meta = evaluate(raw, data.val, s, device, autocast), data.meta
                size = meta["bytes"]["val"]                                             # None: not known
                bits = loss / math.log(2) * meta["tokens"]["val"] / size if size else None
                log.write(json.dumps(dict(kind="eval", step=step, tokens=step * tokens, loss=loss,
                                          bits_per_byte=bits)) + "\n")
                print(f"step {step:>6}/{s.max_iters}  validation loss {loss:.4f}"
                      + (f", {bits:.4f} bits per byte" if bits else ""), flush=True)
                if loss < run["best"]:
                    run["best"] = loss
                    save(out / "best.pt", dict(run, model=raw.state_dict()))
                since += time.perf_counter() - pause
            if step > step0 or not ckpt:
                checkpoint()
        if last:
            break

        # an update's windows depend on seed and step alone: nothing to save, nothing a variant could shift
        starts = np.random.default_rng((s.seed, step)).integers(
            len(data.train) - cfg.block_size, size=(s.gradient_accumulation_steps, s.batch_size))[rank::world]
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * schedule(step, s)
        total = torch.zeros(2, device=device)                                # loss, and whether to stop
        for i, some in enumerate(starts):
            with model.no_sync() if world > 1 and i + 1 < len(starts) else contextlib.nullcontext():
                with autocast():
                    loss = model(*batch(data.train, some, cfg.block_size, device))[1] / len(starts)
                scaler.scale(loss).backward()
            total[0] += loss.detach() / world
            del loss                                                         # and with it the graph's memory
        total[1] = len(stop)
        if world > 1:
            dist.all_reduce(total)
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(raw.parameters(), s.grad_clip or math.inf).item()
        loss, rate = total[0].item(), optimizer.param_groups[0]["lr"]
        if not math.isfinite(loss) or not (math.isfinite(norm) or scaler.is_enabled()):
            raise UserError(f"loss {loss}, gradient norm {norm} in update {step + 1}, learning rate "
                            f"{rate:.2g}: stopped; {out / 'ckpt.pt'} is from before; lower --learning_rate")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run["skipped"] += not math.isfinite(norm)                            # float16: the scaler backs off
        run["step"] = done = step + 1
        if rank == 0 and s.log_interval and done % s.log_interval == 0:
            now = time.perf_counter()
            speed, since = s.log_interval * tokens / (now - since), now
            left = int((s.max_iters - done) * tokens / speed)
            log.write(json.dumps(dict(kind="train", step=done, tokens=done * tokens, loss=loss, lr=rate,
                                      norm=norm, tokens_per_s=round(speed), skipped=run["skipped"])) + "\n")
            print(f"step {done:>6}/{s.max_iters}  loss {loss:.4f}  rate {rate:.2e}  {speed:>9,.0f} tokens/s  "
                  f"{left // 60:>3}:{left % 60:02} left", flush=True)
        if total[1].item() and done < s.max_iters:
            checkpoint()
            if rank == 0:
                print(f"stopped: {out} is saved at step {done}; go on: train.py --resume --out_dir={out}",
                      file=sys.stderr)
            sys.exit(128 + (stop[0] if stop else signal.SIGTERM))
    if rank == 0:
        took = int(time.perf_counter() - began)
        print(f"{took // 60}:{took % 60:02} in all; sample from it: python sample.py --out_dir={out}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    signals = []

    def on_signal(number, frame):
        if signals:
            os._exit(128 + number)                               # the second one does not wait
        signals.append(number)
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    prepare.run(lambda: main(sys.argv[1:], signals))
