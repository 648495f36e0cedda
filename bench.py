"""
What LIMe costs: every variant in a process of its own, all taking turns at every step, or 32 tokens, so that
a busy machine slows all of them alike.

    python bench.py                                         the preset tiny on this machine
    python bench.py --n_layer=32 --n_embd=128 --vs_hf       other sizes, with the transformers library's LLaMA
    python lime.py                                          the paper's tables beside ours (tables() below)

Per variant: median milliseconds of forward, backward and optimizer; the ratio to the first one, as the median
over the rounds; tokens/s; MFU, the share of the machine's own matrix rate; MB kept for backward, and the peak
of the process; tokens/s of generation with and without the cache, and of reading a prompt.
"""

import contextlib
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

import lime
from data import prepare
from data.prepare import UserError
from runs import pick_device

@dataclass
class Settings:
    preset: str = "tiny"  # sizes, a key of lime.PRESETS
    variants: str = "llama,static,dynamic,kv,hc"  # which (hf as well); the first is what the ratios are to
    batch_size: int = 4  # sequences in a step
    rounds: int = 10  # steps of each, after one that is not counted
    generate: int = 256  # tokens to generate in float32, no more than block_size; 0: none
    vs_hf: bool = False  # add LlamaForCausalLM (pip install transformers)
    json: str = ""  # write the numbers to this file
    device: str = "auto"  # as in train.py
    dtype: str = "auto"  # as in train.py
    compile: bool = False  # as in train.py
    seed: int = 1  # of weights and tokens
    work_as: str = ""  # (internal: one variant, which does what is asked on stdin)

# ---- counts ---------------------------------------------------------------------------------------------
def n_params(model):
    """Parameters; the embedding, which is the head as well, counts once."""
    return sum(p.numel() for p in model.parameters())

def forward_flops(cfg, T):
    """Operations of one sequence of T tokens as table 6 counts: matrix products, mixtures, for attention
    4 H T^2 hd + 3 H T^2; embedding, norms and gates 0."""
    L, H, D, Hkv, R = cfg.n_layer, cfg.n_head, cfg.n_embd, cfg.n_kv_head or cfg.n_head, cfg.hc_rate
    hd, S = D // H, L * (L + 1) // 2 - 1                     # S: representations that all blocks >= 1 read
    token = {"llama": 0, "static": H * S * D, "dynamic": 2 * H * S * D, "kv": 2 * Hkv * Hkv * S * hd,
             "hc": 2 * L * D * (R * (R + 2) * cfg.hc_dynamic + R * (R + 2))}[cfg.variant]
    token += cfg.vocab_size * D + L * (2 * D * D + 2 * D * Hkv * hd + 3 * D * cfg.n_hidden)
    return token * T + L * H * T * T * (4 * hd + 3)

def multiply_adds(cfg, T):
    """The same with 2 H T^2 hd for attention: table 6 counts its multiply-adds twice, and its softmax."""
    return forward_flops(cfg, T) - cfg.n_layer * T * T * (2 * cfg.n_embd + 3 * cfg.n_head)

# ---- memory ---------------------------------------------------------------------------------------------
def saved_bytes(model, idx):
    """Bytes that a forward pass keeps for backward, parameters apart: what autograd saves, each storage once,
    and the rows of the depth memory, which lime.Mix holds itself."""
    seen = {}

    def keep(t):
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(idx, idx)[1]
    todo, done = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in done:
            done.add(node)
            todo += [parent for parent, _ in node.next_functions]
            for t in [getattr(node, "rows", None), *(getattr(node, "grads", None) or ())]:
                if t is not None:
                    keep(t)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(size for at, size in seen.items() if at not in weights)

def peak_mb(device):
    """Peak memory so far, MB: the GPU's, or the process'."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:  # not getrusage: a child has its parent's
        with open("/proc/self/status", encoding="utf-8") as f:
            return next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) / 2**10
    except OSError:
        return float("nan")

# ---- time -----------------------------------------------------------------------------------------------
TURN = 32  # tokens: the first after a change of processes takes longer

class Runner:
    """A model, its optimizer, and what is timed of them."""

    def __init__(self, name, cfg, s, device, dtype):
        torch.manual_seed(s.seed)
        self.device, self.dtype, self.name = device, dtype, name
        if name == "hf":
            from transformers import LlamaConfig, LlamaForCausalLM

            self.model = LlamaForCausalLM(LlamaConfig(
                vocab_size=cfg.vocab_size, hidden_size=cfg.n_embd, intermediate_size=cfg.n_hidden,
                num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head, tie_word_embeddings=True,
                num_key_value_heads=cfg.n_kv_head or cfg.n_head, max_position_embeddings=cfg.block_size))
            self.model.to(device)
        else:
            self.model = lime.LIMe(replace(cfg, variant=name)).to(device)
        self.call = torch.compile(self.model) if s.compile else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type != "mps")
        self.x = torch.randint(cfg.vocab_size, (s.batch_size, cfg.block_size),
                               generator=torch.Generator().manual_seed(s.seed)).to(device)

    def clock(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def step(self):
        """Milliseconds of forward, backward, optimizer, and the whole training step."""
        t, x = [self.clock()], self.x
        with self.autocast():
            loss = self.call(x, labels=x, use_cache=False).loss if self.name == "hf" else self.call(x, x)[1]
        t.append(self.clock())
        loss.backward()
        t.append(self.clock())
        self.optimizer.step()
        self.optimizer.zero_grad()
        t.append(self.clock())
        return [1e3 * (b - a) for a, b in (*zip(t, t[1:]), (t[0], t[3]))]

    @torch.no_grad()
    def generation(self, n):
        """Yields after TURN tokens each; then tokens/s of n tokens with the cache, and without it, and of
        reading a prompt of block_size tokens."""
        size, cached, uncached = self.model.cfg.block_size, 0, 0
        idx = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        tokens = self.model.generate(idx, n, temperature=0)
        for i in range(n):
            if i % TURN == 0:
                yield
            t = [self.clock()]
            token = next(tokens)
            t.append(self.clock())
            self.model(idx[:, -size:])[0][:, -1].argmax(-1)
            t.append(self.clock())
            cached, uncached = cached + t[1] - t[0], uncached + t[2] - t[1]
            idx = torch.cat((idx, token[:, None]), 1)
        t = self.clock()
        self.model.hidden(torch.zeros(1, size, dtype=torch.long, device=self.device))
        yield [n / cached, n / uncached, size / (self.clock() - t)]

    def memory(self):
        """A dict: the peak, and of lime's models the MB kept for backward."""
        memory = dict(peak_mb=peak_mb(self.device))
        if self.name != "hf":
            with self.autocast():
                memory["kept_mb"] = saved_bytes(self.model, self.x) / 2**20
        return memory

def work(runner, n):
    """Answer each line of stdin with one of JSON, until there are no more."""
    for line in sys.stdin:
        if line == "text\n":
            tokens = runner.generation(n)
        if line in ("text\n", "tokens\n"):
            answer = next(tokens)
        else:
            answer = {"step\n": runner.step, "memory\n": runner.memory}[line]()
        print(json.dumps(answer), flush=True)

class Worker:
    """A process that has the Runner of a variant. The transformers library's gets the C library's own way of
    freeing memory, as its users have it."""

    def __init__(self, name, argv):
        self.name, self.times, self.speeds = name, [], []
        self.process = subprocess.Popen([sys.executable, __file__, *argv, f"--work_as={name}"], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        start_new_session=True)      # stopped by the end of stdin

    def ask(self, what):
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            print(what, file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        if not answer:
            code = self.process.wait()
            raise UserError(f"the process of {self.name} has ended (exit code {code})" + (
                ": out of memory? Lower --batch_size or the sizes, or name fewer --variants" if code == -9
                else "; what it said is above"))
        return json.loads(answer)

def fastest(f):
    """Seconds of the fastest of ten calls."""
    best = math.inf
    for _ in range(10):
        start = time.perf_counter()
        f()
        best = min(best, time.perf_counter() - start)
    return best

def matrix_rate(device, dtype):
    """FLOP/s of a large matrix product here, now."""
    n = 1024 if device.type == "cpu" else 8192
    a = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n**3 / fastest(lambda: (a @ a)[0, 0].item())

def memory_rate(device):
    """Bytes/s of reading 256 MB."""
    a = torch.ones(2**26, device=device)
    return 4 * a.numel() / fastest(lambda: a.sum().item())

def main(argv):
    parser = prepare.Parser(description=__doc__)
    parser.add_fields(Settings)
    parser.add_fields(lime.Config, skip="variant")
    preset = parser.parse_known_args([a for a in argv if a not in ("-h", "--help")])[0].preset
    if preset not in lime.PRESETS:
        raise UserError(f"--preset={preset}, expected one of {', '.join(lime.PRESETS)}")
    parser.set_defaults(**lime.PRESETS[preset])
    args = vars(parser.parse_args(argv))
    s = Settings(**{f.name: args[f.name] for f in fields(Settings)})
    cfg = lime.Config(**{f.name: args[f.name] for f in fields(lime.Config) if f.name in args})
    names = [name.strip() for name in s.variants.split(",")] + ["hf"] * s.vs_hf
    try:
        for name in [s.work_as] if s.work_as else names:
            lime.check(replace(cfg, variant=name) if name != "hf" else cfg)
    except ValueError as e:
        raise UserError(e) from None
    low = dict(rounds=1, batch_size=1, generate=0, seed=0)
    wrong = [f"--{k}={getattr(s, k)}, expected {v} to 10^9" for k, v in low.items()
             if not v <= getattr(s, k) <= 10 ** 9]
    if s.json and (Path(s.json).is_dir() or not Path(s.json).absolute().parent.is_dir()):
        wrong.append(f"--json={s.json}, expected a file in a folder that is there")
    if wrong:
        raise UserError("; ".join(wrong))
    if "hf" in names and not importlib.util.find_spec("transformers"):
        raise UserError("--vs_hf needs: pip install transformers")
    device, dtype = pick_device(s.device, s.dtype, keep_freed=s.work_as != "hf")
    n = min(s.generate, cfg.block_size)
    if s.work_as:
        return work(Runner(s.work_as, cfg, s, device, dtype), n)

    if s.json and not Path(s.json).exists():  # can it be written: to be known before an hour of measuring
        Path(s.json).touch()
        Path(s.json).unlink()
    rate, workers = matrix_rate(device, dtype), [Worker(name, argv) for name in names]
    for _ in range(s.rounds + 1):
        for w in workers:
            w.times.append(w.ask("step"))
    own = [w for w in workers if w.name != "hf"]
    for _ in range(min(s.rounds, 3) if s.generate else 0):
        for what in "text", *["tokens"] * math.ceil(n / TURN):
            answers = [w.ask(what) for w in own]
        for w, speeds in zip(own, answers):
            w.speeds.append(speeds)
    rate, read, table = max(rate, matrix_rate(device, dtype)), memory_rate(device), []
    print(f"{cfg.n_layer} layers x {cfg.n_embd}, {cfg.n_head} heads, MLP {cfg.n_hidden}, vocabulary "
          f"{cfg.vocab_size}, {s.batch_size} x {cfg.block_size} tokens, {device}, {str(dtype)[6:]}, "
          f"{torch.get_num_threads()} threads, {rate / 1e9:,.0f} GFLOP/s in matrix products, "
          f"{read / 1e9:,.0f} GB/s from memory, {s.rounds} rounds, {n} tokens generated\n"
          "variant   forward backward optimizer   step ms   ratio  tokens/s  MFU   kept MB  peak MB  "
          " cached  uncached  prompt tokens/s")
    for w in workers:
        times = w.times[1:]
        f, b, o, step = (statistics.median(t[i] for t in times) for i in range(4))
        ratio = statistics.median(t[3] / u[3] for t, u in zip(times, workers[0].times[1:]))
        row = dict(variant=w.name, forward=f, backward=b, optimizer=o, step=step, ratio=ratio,
                   tokens_per_s=1e3 * s.batch_size * cfg.block_size / step)
        row.update(w.ask("memory"))
        if w.name != "hf":
            flops = 6 * s.batch_size * multiply_adds(replace(cfg, variant=w.name), cfg.block_size)
            row["mfu"] = flops / (step / 1e3) / rate
            row.update(zip(("cached", "uncached", "prompt"), map(statistics.median, zip(*w.speeds))))
        table.append(row)
        rest = dict(mfu="5.2f", kept_mb="8.1f", peak_mb="8.0f", cached="8.1f", uncached="9.1f", prompt="9.0f")
        print(f"{row['variant']:<9} {f:>7.1f} {b:>8.1f} {o:>9.1f} {step:>9.1f} {ratio:>7.3f} "
              f"{row['tokens_per_s']:>9,.0f} " + " ".join(f"{row.get(k, math.nan):>{how}}"
                                                          for k, how in rest.items()), flush=True)
    if s.json:
        numbers = json.dumps(dict(settings=asdict(s), config=asdict(cfg), matrix_rate=rate, memory_rate=read,
                                  device=str(device), rows=table), indent=1)
        try:
            Path(s.json).write_text(numbers, encoding="utf-8")
        except OSError as e:
            raise UserError(f"--json={s.json}: {e.strerror}; the table above has the numbers") from None

# ---- the paper's tables ---------------------------------------------------------------------------------
def tables():
    """Tables 4 and 6 (parameters, FLOPs, memory) at the paper's 1.2B size and table 5 (pruning), theirs and
    ours. No weights are allocated there; what training keeps is measured at a small size and scaled."""
    paper = replace(lime.Config(), **lime.PRESETS["paper"])
    L, D, T, B = paper.n_layer, paper.n_embd, 2048, 1
    R, small = 4, dict(n_layer=8, n_head=4, n_embd=64, n_hidden=96, block_size=64)
    idx = torch.zeros(2, 64, dtype=torch.long)

    def extra(L, B, T, H, D):  # numbers kept over llama, by formula
        S = L * (L + 1) // 2 - 1
        return dict(static=L * B * T * D, dynamic=L * B * T * D + 2 * B * T * H * S, kv=2 * L * B * T * D)

    kept = {v: saved_bytes(lime.LIMe(lime.Config(v, **small)), idx) / 4 for v in lime.VARIANTS}
    print(f"Tables 4 and 6: {L} layers x {D}, {paper.n_head} heads, MLP {paper.n_hidden}, vocabulary "
          f"{paper.vocab_size:,}; forward TFLOPs at T = {T},\na multiply-add counted as 1; the paper's in "
          "brackets, - where it gives none\n\n"
          f"{'variant':<22}{'parameters':>15} {'(billions)':>10}  {'over llama':>10}{'TFLOPs':>9} {'':>7}"
          f"{'over llama':>10}")
    rows = [("llama", {}, "1.1767", "2.97"), ("static", {}, "1.1768", "2.98"),
            ("dynamic", {}, "1.1856", "3.01"), ("kv", {}, "-", "-"), ("hc", {}, "1.1771", "2.98"),
            ("hc", dict(hc_rate=2), "-", "-"), ("hc", dict(hc_dynamic=False), "-", "-")]
    for variant, fields_, theirs, flops in rows:
        cfg = replace(paper, variant=variant, **fields_)
        with torch.device("meta"):
            n = n_params(lime.LIMe(cfg))
        t = forward_flops(cfg, T) / 1e12
        if variant == "llama":
            base, t0 = n, t
        name = " ".join([variant, *(f"{k}={v}" for k, v in fields_.items())])
        print(f"{name:<22}{n:>15,} {'(' + theirs + ')':>10}  {n / base - 1:>+10.3%}{t:>9.3f} "
              f"{'(' + flops + ')':>7}{t / t0 - 1:>+10.2%}")
    print("\nThe paper prints +0.075% parameters for dynamic; by its own numbers it is +0.75%. It prints "
          "+0.008% for static,\nwhich is the ratio of the rounded billions.\n\n"
          "Numbers kept for backward over llama (the paper's formula; ours; measured here at "
          f"{small['n_layer']} layers x {small['n_embd']} / ours; GB in float32 at the size above, B = 1)")
    theirs = {"static": "(L-1) BTHD", "dynamic": "BTH (L(L+1)/2 - 1) + (L-1) BTHD", "kv": "-"}
    ours = {"static": "L BTD", "dynamic": "L BTD + 2 BTH (L(L+1)/2 - 1)", "kv": "2 L BTD"}
    for v in ours:
        part = (kept[v] - kept["llama"]) / extra(8, 2, 64, 4, 64)[v]
        print(f"{v:<9} {theirs[v]:<33} {ours[v]:<30} {part:>5.2f} "
              f"{4 * extra(L, B, T, paper.n_head, D)[v] / 2**30:>8.2f} GB")
    hc = (kept["hc"] - kept["llama"]) / (2 * 8 * 2 * 64 * 64)
    print(f"{'hc':<9} {'2LBT ((R-1) D + R (R+2))':<33} {f'{hc:.1f} x 2LBTD, at R = {R}':<30} {'':>5} "
          f"{4 * hc * 2 * L * B * T * D / 2**30:>8.2f} GB")
    print("(the paper keeps the mixture of all heads, BTHD a block; lime.Mix makes it again in backward)\n")
    print("Table 5: router weights at the start, and what top-p 0.9 prunes of them (8 heads)")
    for depth, weights, pruned in ((32, 7936, 1845), (64, 32256, 6795), (128, 130048, 24632)):
        torch.manual_seed(1)
        cfg = lime.Config(n_head=8, n_kv_head=8, n_embd=16, route_top_p=0.9)
        routers = [lime.Static(cfg, r) for r in range(1, depth)]
        with torch.no_grad():
            for router in routers:
                router.init_router()
            ours = sum(r.R.numel() for r in routers)
            zero = sum((r.weights(None) == 0).sum().item() for r in routers)
        print(f"{depth:>4} layers: {ours:>6,} weights, {zero:>6,} pruned ({zero / ours:.1%}); the paper, "
              f"trained: {weights:>7,}, {pruned:>6,} ({pruned / weights:.0%})")
    print("The paper's counts are 16 L(L-1)/2; blocks 1..L-1 with r+1 weights a head have 8 (L(L+1)/2 - 1).")

if __name__ == "__main__":
    prepare.run(lambda: main(sys.argv[1:]))
