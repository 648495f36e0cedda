"""
Train a model of lime.py. No flag is needed: it picks the device, makes a small data set if none is there,
trains the preset `tiny` in minutes, and leaves out/<run>/ with ckpt.pt (all that is needed to go on), best.pt
(the weights with the lowest validation loss) and log.jsonl.

    python train.py --variant=dynamic --seed=1     every field of Settings below and of lime.Config is a flag
    python train.py --resume                       the newest run goes on after a stop, a kill or a crash
    torchrun --nproc_per_node=4 train.py --preset=small         several GPUs
"""
import contextlib
import json
import math
import os
import platform
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import bench
import lime
import runs
from data import prepare
from data.prepare import UserError

@dataclass
class Settings:
    preset: str = ""             # sizes and recipe, one of PRESETS; default: tiny, on a GPU mostly small
    dataset: str = ""            # a name under data/, or a folder; default: fineweb_edu if there, else pydocs
    out_dir: str = ""            # the run's folder; default: out/VARIANT, or out/VARIANT-2, -3, ...
    resume: bool = False         # go on with the run in out_dir, by default the newest
    max_iters: int = 0           # updates; 0: the preset's (tiny: a quarter with GPT-2 tokens, as much text)
    batch_size: int = 8          # sequences in a forward pass
    gradient_accumulation_steps: int = 1  # forward passes in an update, of all processes together
    learning_rate: float = 3e-3  # peak of the schedule
    router_lr: float = 1e-2      # peak for the routers
    min_lr: float = 0.0          # end of the cosine (the routers' end is in proportion)
    warmup_iters: int = 40       # updates of linear warm-up
    weight_decay: float = 0.1    # of matrices; embedding, norms and tables of routers have none
    beta1: float = 0.9           # AdamW's
    beta2: float = 0.95          # AdamW's
    grad_clip: float = 1.0       # largest norm of the gradient; 0: off
    eval_interval: int = 100     # updates between evaluations, which also save; 0: only at the end
    eval_iters: int = 20         # batches in an evaluation, windows spread evenly; 0: no evaluation
    log_interval: int = 10       # updates between lines; 0: off
    seed: int = 1                # of the first weights and of the order of the data
    device: str = "auto"         # cpu, cuda, cuda:1, mps; auto: the best there is
    dtype: str = "auto"          # of products: float32, bfloat16, float16; auto: bfloat16 if a GPU has it
    compile: bool = False        # torch.compile the whole model: a minute's wait, then faster steps on a GPU

# What each preset of lime.PRESETS sets here. deep*, paper: the paper's table 3, 1024 sequences split up.
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

# ---- settings -------------------------------------------------------------------------------------------
def check(s):
    """Raise UserError that names every number out of its range (no assert: python -O checks as well)."""
    low = dict(batch_size=1, gradient_accumulation_steps=1, learning_rate=1e-12)
    high = dict(beta1=0.9999999, beta2=0.9999999, seed=2 ** 63 - 1,
                min_lr=s.learning_rate if s.learning_rate > 0 else 10 ** 9)
    wrong = [f"--{k}={v}, expected {low.get(k, 0)} to {high.get(k, 10 ** 9)}" for k, v in asdict(s).items()
             if type(v) in (int, float) and not low.get(k, 0) <= v <= high.get(k, 10 ** 9)]
    if wrong:
        raise UserError("; ".join(wrong))

def parse(argv):
    """(Settings, lime.Config, checkpoint to resume or None). Flags override the resumed run, or else the
    preset, or else the defaults of the two classes."""
    parser = prepare.Parser(description=__doc__)
    parser.add_fields(Settings)
    parser.add_fields(lime.Config)
    first = parser.parse_known_args([a for a in argv if a not in ("-h", "--help")])[0]
    ckpt, saved = None, {}
    if first.resume:
        first.out_dir = first.out_dir or runs.newest_run()
        ckpt = runs.load_run(Path(first.out_dir, "ckpt.pt"), can_go_on)
        saved = {**ckpt["settings"], **ckpt["config"], "resume": True}
        parser.set_defaults(**saved)
    else:
        dataset = first.dataset or ("fineweb_edu" if "fineweb_edu" in prepare.prepared() else "pydocs")
        on_gpu = runs.pick_device(first.device)[0].type == "cuda"
        preset = first.preset or ("small" if on_gpu and dataset != "pydocs" else "tiny")
        if preset not in PRESETS:
            raise UserError(f"--preset={preset}, expected one of {', '.join(PRESETS)}")
        own = dict(dataset=dataset, preset=preset, vocab_size=0, max_iters=0)   # 0: once the data are known
        parser.set_defaults(**{**lime.PRESETS[preset], **PRESETS[preset], **own})
        folder = Path(first.out_dir)
        if first.out_dir and (old := [*folder.glob("*.pt"), *folder.glob("log.jsonl")]):
            raise UserError(f"{first.out_dir} holds {old[0].name}: go on with it (--resume), or give another")
    args = {**vars(parser.parse_args(argv)), "out_dir": first.out_dir}
    s = Settings(**{f.name: args[f.name] for f in fields(Settings)})
    cfg = lime.Config(**{f.name: args[f.name] for f in fields(lime.Config)})
    check(s)
    try:
        lime.check(replace(cfg, vocab_size=cfg.vocab_size or 1))
    except ValueError as e:
        raise UserError(e) from None
    differ = [f"--{k}={args[k]} (was {v})" for k, v in saved.items() if k not in MAY_CHANGE and v != args[k]]
    if differ:
        raise UserError(f"{s.out_dir} can't go on with {', '.join(differ)}: leave that out, or start anew")
    s.max_iters = s.max_iters or saved.get("max_iters", 0)
    return s, cfg, ckpt

# ---- training -------------------------------------------------------------------------------------------
def param_groups(model, s):
    """AdamW's groups, as in table 3 of the paper: routers have a rate of their own; matrices decay, but not
    the embedding, nor the tables of static and kv routers and of Hyper-Connections."""
    groups = {}
    for name, p in model.named_parameters():
        router = name.endswith(("memory.R", "memory.W"))
        table = name.endswith(("embed", "memory.R", ".A"))
        groups.setdefault((router, p.ndim >= 2 and not table), []).append(p)
    return [dict(params=params, lr=s.router_lr if router else s.learning_rate,
                 weight_decay=s.weight_decay * decay) for (router, decay), params in groups.items()]

def can_go_on(ckpt, model):
    """Raise ValueError if training can't go on from this checkpoint, as before it was saved."""
    runs.expect("optimizer" in ckpt, "it has weights alone, as best.pt has")
    runs.same_fields(Settings, ckpt["settings"])
    optimizer = torch.optim.AdamW(param_groups(model, Settings(**ckpt["settings"])))
    optimizer.load_state_dict(ckpt["optimizer"])
    runs.expect(all(state["exp_avg"].shape == p.shape for p, state in optimizer.state.items()),
                "its optimizer is not this model's")

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
def evaluate(model, split, s, device):
    """Validation loss, nats per token: the mean over windows spread evenly, the same ones for every run."""
    block_size = model.cfg.block_size
    starts = np.linspace(0, len(split) - block_size - 1, s.eval_iters * s.batch_size).astype(int)
    return sum(model(*batch(split, some, block_size, device))[1].item()
               for some in starts.reshape(s.eval_iters, s.batch_size)) / s.eval_iters

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

def main(argv, stop=None):
    """One run. `stop` is where a signal's number appears when the run is to end early."""
    s, cfg, ckpt = parse(argv)
    stop = [] if stop is None else stop
    step0 = ckpt["step"] if ckpt else 0
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device, dtype = runs.pick_device(s.device, s.dtype)
    if s.gradient_accumulation_steps % world:
        raise UserError(f"--gradient_accumulation_steps={s.gradient_accumulation_steps}, expected a multiple "
                        f"of the {world} processes")
    if ckpt and step0 >= s.max_iters:
        if rank == 0:
            print(f"{s.out_dir} is already at step {step0}, nothing to do: --max_iters={s.max_iters}")
        return
    if s.dataset == "pydocs" and rank == 0:
        print("Data: the documentation inside Python. For better text: python data/prepare.py fineweb_edu")
        if "pydocs" not in prepare.prepared():
            prepare.prepare_pydocs()
    if world > 1:                                                # waits for all: the data are there after it
        if device.type == "cuda":
            device, _ = runs.pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    data = prepare.load(s.dataset, cfg.block_size, vocab_size=None if ckpt else cfg.vocab_size)
    if ckpt and ckpt["data"] != data.fingerprint:
        raise UserError(f"{s.dataset} is not the data of {s.out_dir}; prepare that, or begin anew")
    cfg.vocab_size = cfg.vocab_size or data.vocab_size
    quarter = s.preset == "tiny" and data.tokenizer == "gpt2"
    s.max_iters = s.max_iters or PRESETS[s.preset]["max_iters"] // (4 if quarter else 1)

    torch.manual_seed(s.seed)
    raw = model = lime.LIMe(cfg).to(device)
    optimizer = torch.optim.AdamW(param_groups(raw, s), betas=(s.beta1, s.beta2), fused=True)
    peaks = [group["lr"] for group in optimizer.param_groups]
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run = dict(format=1, step=step0, best=math.inf, skipped=0, tokenizer=data.tokenizer,
               data=data.fingerprint, config=asdict(cfg), settings=asdict(s))
    if ckpt:
        raw.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        scaler.load_state_dict(ckpt["scaler"])
        run.update(best=runs.best_loss(s.out_dir), skipped=ckpt["skipped"])

    def autocast():
        return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    def checkpoint():
        if rank == 0:
            runs.save(out / "ckpt.pt", dict(run, model=raw.state_dict(), optimizer=optimizer.state_dict(),
                                            scaler=scaler.state_dict()))

    def record(text, **line):
        log.write(json.dumps(line) + "\n")
        try:
            print(text, flush=True)
        except BrokenPipeError:                                  # the reader went away: stop as by a signal
            prepare.discard_stdout()
            stop.append(13)                                      # SIGPIPE, which Windows has no name for

    if s.compile:
        with autocast():
            model = compiled(raw, batch(data.train, [0] * s.batch_size, cfg.block_size, device))
    if world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    if rank == 0:
        out = Path(s.out_dir) if ckpt else runs.new_run(s.out_dir, cfg.variant)
        head = dict(kind="resume" if ckpt else "run", step=step0, settings=asdict(s), config=asdict(cfg),
                    device=str(device), dtype=str(dtype), parameters=bench.n_params(raw), processes=world,
                    flops_per_token=6 * bench.forward_flops(cfg, cfg.block_size) // cfg.block_size,
                    data=data.meta, threads=torch.get_num_threads(), python=platform.python_version(),
                    torch=torch.__version__)
        log, evaluated = runs.open_log(out / "log.jsonl", head, ckpt)
        print(f"{out}: {cfg.variant}, {head['parameters']:,} parameters, {device}, {str(dtype)[6:]}; "
              f"{s.dataset}: {len(data.train):,} tokens ({data.tokenizer}) to train on, "
              f"{len(data.val):,} to validate", flush=True)

    tokens = s.batch_size * s.gradient_accumulation_steps * cfg.block_size              # in an update
    began, since, logged = time.perf_counter(), time.perf_counter(), step0
    for step in range(step0, s.max_iters + 1):
        last = step == s.max_iters
        if last or s.eval_interval and step % s.eval_interval == 0:
            if rank == 0 and s.eval_iters and not (step == step0 and evaluated):
                pause, n, size = time.perf_counter(), data.meta["tokens"]["val"], data.meta["bytes"]["val"]
                with autocast():
                    loss = evaluate(raw, data.val, s, device)
                if not math.isfinite(loss):
                    raise UserError(f"validation loss {loss} at step {step}: stopped, the last save is kept; "
                                    "lower --learning_rate")
                bits = loss / math.log(2) * n / size if size else None                  # per byte of text
                record(f"step {step:>6}/{s.max_iters}  validation loss {loss:.4f}"
                       + (f", {bits:.4f} bits per byte" if bits else ""),
                       kind="eval", step=step, tokens=step * tokens, loss=loss, bits_per_byte=bits)
                if loss < run["best"]:
                    run["best"] = loss
                    runs.save(out / "best.pt", dict(run, model=raw.state_dict()))
                since += time.perf_counter() - pause
            checkpoint()
        if last:
            break

        # which windows an update sees depends on seed and step alone: nothing to save, no variant shifts it
        starts = np.random.default_rng((s.seed, step)).integers(
            len(data.train) - cfg.block_size, size=(s.gradient_accumulation_steps, s.batch_size))[rank::world]
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * schedule(step, s)
        total = torch.zeros(2, device=device)                    # loss, and whether to stop
        for i, some in enumerate(starts, 1):
            more = world > 1 and i < len(starts)                 # average after the last one
            with model.no_sync() if more else contextlib.nullcontext():
                with autocast():
                    loss = model(*batch(data.train, some, cfg.block_size, device))[1] / len(starts)
                scaler.scale(loss).backward()
            total[0] += loss.detach() / world
            del loss                                             # or the graph lives on beside the next one
        total[1] = len(stop)
        if world > 1:
            dist.all_reduce(total)
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(raw.parameters(), s.grad_clip or math.inf).item()
        loss, rate, done = total[0].item(), optimizer.param_groups[0]["lr"], step + 1
        if not math.isfinite(loss) or not (math.isfinite(norm) or scaler.is_enabled()):
            raise UserError(f"loss {loss}, gradient norm {norm} in update {done}, learning rate {rate:.2g}: "
                            "stopped before it, the last save is kept; lower --learning_rate")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run["skipped"] += not math.isfinite(norm)                # float16: the scaler backs off
        run["step"] = done
        if rank == 0 and s.log_interval and done % s.log_interval == 0:
            now = time.perf_counter()
            speed = (done - logged) * tokens / (now - since)
            left, since, logged = int((s.max_iters - done) * tokens / speed), now, done
            record(f"step {done:>6}/{s.max_iters}  loss {loss:.4f}  rate {rate:.2e}  {speed:>9,.0f} tokens/s"
                   f"  {left // 60:>3}:{left % 60:02} left", kind="train", step=done, tokens=done * tokens,
                   loss=loss, lr=rate, norm=norm, tokens_per_s=round(speed), skipped=run["skipped"])
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
        if "TORCHELASTIC_RUN_ID" not in os.environ:               # torchrun sends a Ctrl-C a second time
            if signals:
                os._exit(128 + number)
            os.write(2, b"stopping after this update; once more: at once\n")
        signals.append(number)
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    prepare.run(lambda: main(sys.argv[1:], signals))
