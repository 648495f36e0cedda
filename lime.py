"""
LIMe in one file: a LLaMA whose attention heads read a learned mixture of all earlier layers' representations.

A block of a plain Transformer sees only what the block before it left behind, and late layers make distinct tokens
alike. LIMe (Layer-Integrated Memory, arXiv 2502.09245) keeps the residual stream that entered every block so far and
lets each head take its keys and values from a mixture of them all; queries still come from the current stream.

Letters, in the shape comments too: B batch, T tokens, V vocabulary, L blocks, D features (n_embd), M features inside
the MLP (n_hidden), H heads, Hkv key-value heads, hd = D/H features of a head; x_0 is the embedding, x_m the stream
that enters block m, and block r may read the representations m = 0..r.
"""
import math
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclass
class Config:
    variant: str = "static"       # a key of VARIANTS: llama, static, dynamic, kv, hc
    n_layer: int = 16             # L
    n_head: int = 4               # H
    n_kv_head: int = 0            # Hkv, divides H; 0: the same as n_head
    n_embd: int = 64              # D, a multiple of 2H
    n_hidden: int = 256           # M
    vocab_size: int = 257         # V
    block_size: int = 256         # the most tokens the model looks back on
    kv_init: str = "small"        # start of keys and values in blocks >= 1: "small" +-1/D (authors), "normal" std 0.02
    route_top_p: float = 1.0      # static: of each head's weights keep the largest that reach this sum, in (0, 1]
    router_init: str = "uniform"  # kv: start of R off the block's own heads: "uniform" (authors), "zero" (is llama)
    hc_rate: int = 4              # hc: residual streams, >= 1
    hc_dynamic: bool = True       # hc: weights from the token as well
    rope_theta: float = 10000.0   # rotary embedding: base of the wavelengths
    norm_eps: float = 1e-6        # RMSNorm: added to the mean square


def normalise(x, eps):
    """RMSNorm without its gain, n = x / rms(x). The gain belongs to whoever reads n."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def project(n, w, g):
    """(n * g) @ w.T, with the norm's gain g (D,) multiplied into the smaller of n (..., D) and w (out, D)."""
    return F.linear(n * g, w) if n.numel() < w.numel() else F.linear(n, w * g)


# ---------------------------------------------------------------------------------------------------------------
# LIMe: what a block writes into the memory, and what its heads read from it

class Own(nn.Module):
    """LLaMA: keys and values from the block's own stream. Every variant's block is this one, or replaces two methods:

        write(n, g, memory)  puts what this block adds into the memory; n = x_r / rms(x_r), (B, T, D), g the block's gain
        read(memory, g)      keys and values of this block, side by side, (B, Hkv, T, 2 hd), before rotation
    """
    def __init__(self, cfg, r):
        super().__init__()
        self.r, self.D, self.H, self.Hkv, self.hd = r, cfg.n_embd, cfg.n_head, cfg.n_kv_head, cfg.n_embd // cfg.n_head
        self.wkv = nn.Parameter(torch.empty(self.Hkv * 2 * self.hd, self.D))       # of each head: K rows, then V rows

    def write(self, n, g, memory):
        memory.last = n

    def read(self, memory, g):
        return project(memory.last, self.wkv, g).unflatten(-1, (self.Hkv, -1)).transpose(1, 2)

    def weights(self, n):
        """What the router chose, if there is one; see the subclasses."""

    def init_router(self):
        pass


class Stream(Own):
    """Block 0 of static and dynamic: reads itself, but writes its stream for the blocks above."""
    def write(self, n, g, memory):
        memory.last = n
        memory.append(n.flatten(0, 1)[None])                                        # one row, (1, B*T, D)


class Static(Stream):
    """LIMe v1, static router: a table of logits R (H, r+1); every head h mixes all streams with the same weights for
    every token, then projects:

        z_h = sum_m softmax(R_h)_m n_m        K_h, V_h = z_h W_h        (paper section 3)

    The paper's RMSNorm(x_m; g_r) is g_r * n_m: n_m is shared by all blocks, the block's gain g_r goes into W."""
    def __init__(self, cfg, r):
        super().__init__(cfg, r)
        self.top_p = cfg.route_top_p
        self.gain = nn.Parameter(torch.ones(self.D))                                # g_r, apart from the query's gain
        self.R = nn.Parameter(torch.empty(self.H, r + 1))

    def init_router(self):
        self.R.normal_(0, 0.1)

    def weights(self, n):
        """a (H, r+1), each head's share of every representation; rows sum to 1."""
        a = self.R.softmax(-1)
        if self.top_p < 1:                       # the smallest set that reaches top_p; the entry that crosses it stays
            p, order = a.detach().sort(dim=-1, descending=True)
            a = a * torch.zeros_like(a).scatter(-1, order, (p.cumsum(-1) - p < self.top_p).to(a.dtype))
            a = a / a.sum(-1, keepdim=True)
        return a

    def read(self, memory, g):
        w = (self.wkv * self.gain).view(self.H, 2 * self.hd, self.D)
        kv = memory.mix(self.weights(memory.last), w)                               # (H, B*T, 2 hd)
        return kv.unflatten(1, memory.last.shape[:2]).transpose(0, 1)


class Dynamic(Static):
    """LIMe v1, dynamic router: the same, but the logits come from the token: a linear map of the block's own stream.

        a = softmax(W g_r n_r)                z_h = sum_m a_hm n_m      K_h, V_h = z_h W_h"""
    def __init__(self, cfg, r):
        super().__init__(cfg, r)
        del self.R
        self.W = nn.Parameter(torch.empty(self.H * (r + 1), self.D))

    def init_router(self):
        self.W.normal_(0, 0.02)

    def weights(self, n):
        """a (B*T, H, r+1), every token's own weights."""
        with torch.autocast(n.device.type, enabled=False):
            return project(n, self.W, self.gain).view(-1, self.H, self.r + 1).softmax(-1)


class Pair(Own):
    """Block 0 of kv: reads its own keys and values, and writes them for the blocks above."""
    def write(self, n, g, memory):
        memory.last = super().read(Own.write(self, n, g, memory) or memory, g)      # (B, Hkv, T, 2 hd)
        memory.append(memory.last.transpose(0, 1).flatten(1, 2))                    # Hkv rows, (Hkv, B*T, 2 hd)

    def read(self, memory, g):
        return memory.last


class KeyValue(Pair):
    """LIMe v2: every key-value head is a signed sum, no softmax, of all heads' keys and values of all blocks so far.

        [K|V]_h = sum_m,h' R[h, m Hkv + h'] [k|v]_m,h'                  R (Hkv, (r+1) Hkv)"""
    def __init__(self, cfg, r):
        super().__init__(cfg, r)
        self.start = cfg.router_init
        self.R = nn.Parameter(torch.empty(self.Hkv, (r + 1) * self.Hkv))

    def init_router(self):
        b = math.sqrt(3 / self.R.shape[1]) if self.start == "uniform" else 0.0
        self.R.uniform_(-b, b)
        self.R[:, -self.Hkv:] = torch.eye(self.Hkv)                                 # the block's own heads

    def weights(self, n):
        """R itself (Hkv, (r+1) Hkv), signed."""
        return self.R

    def read(self, memory, g):
        kv = memory.mix(self.weights(None))                                                   # (Hkv, B*T, 2 hd)
        B, _, T, _ = memory.last.shape
        return kv.unflatten(1, (B, T)).transpose(0, 1)


class Memory:
    """The depth memory of one forward pass: rows (S, B*T, F), in the order written.

    In training, all rows lie in one buffer and so do their gradients: a block neither copies what earlier blocks
    wrote nor keeps its mixture (see Mix). """
    def __init__(self, size):
        self.size, self.used, self.rows, self.last = size, 0, None, None

    def append(self, new):                                                          # new (s, B*T, F)
        if torch.compiler.is_compiling():
            self.rows = (self.rows or []) + [new]
            return
        if self.rows is None:
            self.rows = new.new_empty(self.size, *new.shape[1:], dtype=torch.promote_types(new.dtype, torch.float32))
        self.rows = Append.apply(self.rows, new, self.used)
        self.used += len(new)

    def mix(self, a, w=None):
        """out[h] = sum_m a[h, m] rows[m], for a (H, S) or, per token, (B*T, H, S); with w (H, out, F) each head's
        mixture is projected as well: (H, B*T, out)."""
        if torch.compiler.is_compiling():
            return checkpoint(mix_plain, a, w, *self.rows, use_reentrant=False)
        device = a.device.type
        if w is not None and torch.is_autocast_enabled(device):                     # mix in float32, project in bfloat16
            w = w.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            self.rows, out = Mix.apply(self.rows, a, w, self.used)
        return out


def mix_plain(a, w, *rows):
    z = torch.einsum("hm,mnf->hnf" if a.ndim == 2 else "nhm,mnf->hnf", a, torch.cat(rows).to(a.dtype))
    return z if w is None else torch.einsum("hnf,hof->hno", z, w.to(z.dtype))


class Append(torch.autograd.Function):
    """rows[i:] = new, in place; backward hands row i of the one gradient buffer to its writer."""
    @staticmethod
    def forward(ctx, rows, new, i):
        ctx.span, ctx.dtype = slice(i, i + len(new)), new.dtype
        rows[ctx.span] = new
        ctx.mark_dirty(rows)
        return rows

    @staticmethod
    def backward(ctx, grad):
        return grad, grad[ctx.span].to(ctx.dtype), None


class Mix(torch.autograd.Function):
    """Memory.mix, piece by piece of the tokens, so that the mixture (H, B*T, F) never exists as a whole; backward
    makes each piece again. Every mixing is one matrix product, and so is adding up the rows' gradients."""
    size = 2 ** 19                                                                  # numbers in a piece of the mixture
    @staticmethod
    def pieces(rows, a, w, S):
        size = max(1, Mix.size // (a.shape[-2] * rows.shape[-1]))
        for i in range(0, rows.shape[1], size):
            c = slice(i, i + size)
            x = rows[:S, c]                                                         # (S, c, F)
            if a.ndim == 2:
                yield c, x, a, (a @ x.flatten(1)).unflatten(1, x.shape[1:])         # z (H, c, F)
            else:
                yield c, x, a[c], torch.bmm(a[c], x.transpose(0, 1)).transpose(0, 1)

    @staticmethod
    def forward(ctx, rows, a, w, S):
        ctx.S, ctx.rows = S, rows.detach()       # not save_for_backward: later blocks go on writing, to other rows
        ctx.save_for_backward(a, w)
        out = (rows if w is None else w).new_empty(a.shape[-2], rows.shape[1], rows.shape[-1] if w is None else w.shape[1])
        for c, x, _, z in Mix.pieces(rows, a, w, S):
            out[:, c] = z if w is None else z.to(w.dtype) @ w.transpose(1, 2)
        ctx.mark_dirty(rows)
        ctx.set_materialize_grads(False)
        return rows, out

    @staticmethod
    def backward(ctx, grad, dout):
        (a, w), rows, S = ctx.saved_tensors, ctx.rows, ctx.S
        if grad is None:                                                            # the last block to read
            grad = torch.zeros_like(rows)
        da, dw = torch.zeros_like(a), None if w is None else torch.zeros_like(w, dtype=a.dtype)
        for c, x, ac, z in Mix.pieces(rows, a, w, S):
            dz = dout[:, c]
            if w is not None:
                dw += dz.transpose(1, 2) @ z.to(w.dtype)
                dz = dz @ w
            dz = dz.to(a.dtype)
            if a.ndim == 2:
                dz = dz.flatten(1)
                da.addmm_(dz, x.flatten(1).T)
                grad[:S, c].flatten(1).addmm_(a.T, dz)
            else:
                dz = dz.transpose(0, 1)                                             # (c, H, F)
                da[c] = torch.bmm(dz, x.permute(1, 2, 0))
                grad[:S, c] += torch.bmm(ac.transpose(1, 2), dz).transpose(0, 1)
        return grad, da, dw, None


# ---------------------------------------------------------------------------------------------------------------
# the residual stream: LLaMA's, and the paper's other baseline

class Residual(nn.Module):
    """x + f(norm(x)); f multiplies the norm's gain itself."""
    gain = True

    def __init__(self, cfg, r):
        super().__init__()
        self.eps = cfg.norm_eps

    def forward(self, x, f):
        return x + f(normalise(x, self.eps))

    @staticmethod
    def expand(x, cfg):
        return x

    @staticmethod
    def collapse(x):
        return x


class HyperConnection(Residual):
    """Hyper-Connections (arXiv 2409.19606): hc_rate streams h (R, B, T, D); the layer reads one mixture of them, and
    its output is added to R others. norm = LayerNorm without gain.

        alpha = A + s_a tanh(norm(h) W_a)     beta = b + s_b tanh(norm(h) w_b)
        mix   = alpha^T h                     h    = beta f(norm(mix_0)) + mix_1..R"""
    gain = False

    def __init__(self, cfg, r):
        super().__init__(cfg, r)
        R, D = cfg.hc_rate, cfg.n_embd
        self.dynamic = cfg.hc_dynamic
        self.A = nn.Parameter(torch.cat((F.one_hot(torch.tensor([r % R]), R).T.float(), torch.eye(R)), 1))
        self.b = nn.Parameter(torch.ones(R))
        if self.dynamic:
            self.Wa, self.wb = nn.Parameter(torch.zeros(D, R + 1)), nn.Parameter(torch.zeros(D))
            self.sa, self.sb = nn.Parameter(torch.tensor([0.01])), nn.Parameter(torch.tensor([0.01]))

    def forward(self, h, f):                                                        # (B, T, R, D)
        alpha, beta = self.A, self.b
        if self.dynamic:
            n = F.layer_norm(h, h.shape[-1:])
            alpha = alpha + self.sa * torch.tanh(n @ self.Wa)                       # (B, T, R, R+1)
            beta = beta + self.sb * torch.tanh(n @ self.wb)                         # (B, T, R)
        mix = alpha.transpose(-1, -2) @ h                                           # (B, T, R+1, D)
        y = f(F.layer_norm(mix[..., 0, :], h.shape[-1:]))
        return beta[..., None] * y[..., None, :] + mix[..., 1:, :]

    @staticmethod
    def expand(x, cfg):
        return x[..., None, :].expand(*x.shape[:-1], cfg.hc_rate, -1)

    @staticmethod
    def collapse(h):
        return h.sum(-2)


# variant: (memory of block 0, memory of the blocks above, residual)
VARIANTS = {
    "llama":   (Own, Own, Residual),
    "static":  (Stream, Static, Residual),
    "dynamic": (Stream, Dynamic, Residual),
    "kv":      (Pair, KeyValue, Residual),
    "hc":      (Own, Own, HyperConnection),
}


# ---------------------------------------------------------------------------------------------------------------
# the block

def rotate(x, cos, sin):
    """Rotary position embedding of x (..., T, hd): the pair of features (i, i + hd/2) turns with the position."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self, cfg, r):
        super().__init__()
        first, rest, residual = VARIANTS[cfg.variant]
        self.H, D = cfg.n_head, cfg.n_embd
        self.gain = nn.Parameter(torch.ones(D)) if residual.gain else 1.0
        self.wq = nn.Parameter(torch.empty(D, D))
        self.wo = nn.Parameter(torch.empty(D, D))
        self.memory = (rest if r else first)(cfg, r)

    def forward(self, n, memory, rope, cache, start, trace):
        q = project(n, self.wq, self.gain).unflatten(-1, (self.H, -1)).transpose(1, 2)     # (B, H, T, hd)
        self.memory.write(n, self.gain, memory)
        k, v = self.memory.read(memory, self.gain).chunk(2, -1)                     # (B, Hkv, T, hd) each
        if trace is not None:
            trace.setdefault("values", []).append(v)
            trace.setdefault("weights", []).append(self.memory.weights(n))
        q, k = rotate(q, *rope), rotate(k, *rope)
        T, mask = n.shape[1], None
        if cache is not None:                                                       # (2, B, Hkv, block_size, hd)
            cache[0, :, :, start:start + T], cache[1, :, :, start:start + T] = k, v
            k, v = cache[:, :, :, :start + T]
            if start and T > 1:
                mask = torch.ones(T, start + T, dtype=torch.bool, device=n.device).tril(start)
        y = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), mask, is_causal=T > 1 and mask is None,
                                           enable_gqa=k.shape[1] != self.H)
        return F.linear(y.transpose(1, 2).flatten(2), self.wo)


class MLP(nn.Module):
    """SwiGLU: (silu(n w1) * (n w3)) w2."""
    def __init__(self, cfg):
        super().__init__()
        D, M = cfg.n_embd, cfg.n_hidden
        self.gain = nn.Parameter(torch.ones(D)) if VARIANTS[cfg.variant][2].gain else 1.0
        self.w1, self.w3 = nn.Parameter(torch.empty(M, D)), nn.Parameter(torch.empty(M, D))
        self.w2 = nn.Parameter(torch.empty(D, M))

    def forward(self, n):
        return F.linear(F.silu(project(n, self.w1, self.gain)) * project(n, self.w3, self.gain), self.w2)


class Block(nn.Module):
    def __init__(self, cfg, r):
        super().__init__()
        residual = VARIANTS[cfg.variant][2]
        self.attn, self.mlp = Attention(cfg, r), MLP(cfg)
        self.res1, self.res2 = residual(cfg, r), residual(cfg, r)

    def forward(self, x, *args):
        x = self.res1(x, lambda n: self.attn(n, *args))
        return self.res2(x, self.mlp)


class LIMe(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        check(cfg)
        cfg = replace(cfg, n_kv_head=cfg.n_kv_head or cfg.n_head)
        self.cfg = cfg
        self.embed = nn.Parameter(torch.empty(cfg.vocab_size, cfg.n_embd))          # also the output head
        self.blocks = nn.ModuleList(Block(cfg, r) for r in range(cfg.n_layer))
        self.gain = nn.Parameter(torch.ones(cfg.n_embd))
        hd = cfg.n_embd // cfg.n_head
        angle = torch.outer(torch.arange(cfg.block_size), cfg.rope_theta ** (torch.arange(0, hd, 2) / -hd))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self):
        for name, p in self.named_parameters():
            small = self.cfg.kv_init == "small" and not name.startswith("blocks.0.")
            if name.endswith("wkv") and small:
                p.uniform_(-1 / self.cfg.n_embd, 1 / self.cfg.n_embd)
            elif name.endswith(("embed", "wq", "wkv", "wo", "w1", "w2", "w3")):
                p.normal_(0, 0.02)
        for b in self.blocks:
            b.attn.memory.init_router()

    def hidden(self, idx, cache=None, start=0, trace=None):
        T = idx.shape[1]
        rope = self.cos[start:start + T], self.sin[start:start + T]
        memory = Memory(self.cfg.n_layer * (self.cfg.n_kv_head if self.cfg.variant == "kv" else 1))
        residual = VARIANTS[self.cfg.variant][2]
        x = residual.expand(F.embedding(idx, self.embed), self.cfg)
        for r, block in enumerate(self.blocks):
            if trace is not None:
                trace.setdefault("hidden", []).append(residual.collapse(x))
            x = block(x, memory, rope, None if cache is None else cache[r], start, trace)
        if trace is not None:
            trace["hidden"].append(residual.collapse(x))
        return normalise(residual.collapse(x), self.cfg.norm_eps)

    def forward(self, idx, targets=None, trace=None):
        """Logits (B, T, V) for ids idx (B, T), and the mean cross-entropy with targets (B, T) in nats, or None.

        With a dict as trace, it receives lists over blocks: `hidden`, the streams x_0..x_L (B, T, D); `values`
        (B, Hkv, T, hd); `weights`, what the routers chose: None without a router, static (H, r+1), dynamic
        (B*T, H, r+1), kv (Hkv, (r+1) Hkv)."""
        n = self.hidden(idx, trace=trace)
        logits = project(n, self.embed, self.gain)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, generator=None, n_vocab=None):
        """Yield max_new_tokens tokens (B,), each drawn from what follows idx (B, T) and the tokens before it, as `draw`
        does. The cache holds the keys (rotated) and values of every block, as a plain Transformer's. Once the text
        is longer than block_size, each token costs a pass over the last block_size tokens, whose positions shift."""
        cfg, S = self.cfg, self.cfg.block_size
        cache = self.embed.new_empty(cfg.n_layer, 2, len(idx), cfg.n_kv_head, S, cfg.n_embd // cfg.n_head)
        idx, new, start = idx[:, -S:], idx[:, -S:], 0
        for _ in range(max_new_tokens):
            logits = project(self.hidden(new, cache, start)[:, -1], self.embed, self.gain)[:, :n_vocab]
            token = draw(logits, temperature, top_k, top_p, generator).to(idx.device)
            yield token
            start += new.shape[1]
            new = token[:, None]
            idx = torch.cat((idx, new), 1)[:, -S:]
            if start == S:
                new, start = idx, 0


def draw(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """One token (B,) from logits (B, V), on the CPU, so that a seed gives the same text on every device. temperature 0:
    the likeliest; top_k > 0: among the k likeliest; top_p < 1: among the fewest that have this share."""
    logits = logits.float().cpu()
    if temperature == 0:
        return logits.argmax(-1)
    logits, order = (logits / temperature).sort(-1, descending=True)
    p = logits.softmax(-1)
    out = p.cumsum(-1) - p >= top_p                                                 # the likeliest token always stays
    if top_k:
        out[:, top_k:] = True
    return order.gather(-1, torch.multinomial(p.masked_fill(out, 0), 1, generator=generator))[:, 0]


def check(cfg):
    """Raise ValueError with one line that names every field out of its range."""
    sizes = "n_layer n_head n_embd n_hidden vocab_size block_size hc_rate".split()
    wrong = [f"{k} is {getattr(cfg, k)}, expected at least 1" for k in sizes if getattr(cfg, k) < 1]
    for k, choices in dict(variant=VARIANTS, kv_init=("small", "normal"), router_init=("uniform", "zero")).items():
        if getattr(cfg, k) not in choices:
            wrong.append(f"{k} is {getattr(cfg, k)}, expected one of {', '.join(choices)}")
    if not wrong:
        H, Hkv, p = cfg.n_head, cfg.n_kv_head or cfg.n_head, cfg.route_top_p
        wrong = [message for bad, message in (
            (cfg.n_embd % (2 * H), f"n_embd is {cfg.n_embd}, expected a multiple of 2 n_head = {2 * H}"),
            (Hkv < 1 or H % Hkv, f"n_kv_head is {Hkv}, expected a divisor of n_head = {H}"),
            (H != Hkv and cfg.variant in ("static", "dynamic"), f"n_kv_head is {Hkv}, expected n_head = {H}: every query "
             f"head of {cfg.variant} reads a mixture of its own, so none can share keys (llama, kv and hc can)"),
            (not 0 < p <= 1, f"route_top_p is {p}, expected in (0, 1]"),
            (p < 1 and cfg.variant != "static", f"route_top_p is {p}, which only variant static can use"),
            (not 0 < cfg.rope_theta < math.inf, f"rope_theta is {cfg.rope_theta}, expected above 0"),
            (not 0 <= cfg.norm_eps < 1, f"norm_eps is {cfg.norm_eps}, expected in [0, 1)")) if bad]
    if wrong:
        raise ValueError("; ".join(wrong))


def n_params(model):
    """Parameters; the embedding, which is the head too, counts once."""
    return sum(p.numel() for p in model.parameters())


def forward_flops(cfg, T):
    """Multiply-adds of one sequence of T tokens, as table 6 of the paper counts: matrix products and mixtures, attention
    as 4 H T^2 hd + 3 H T^2, embeddings, norms and gates 0."""
    L, H, D, M, Hkv = cfg.n_layer, cfg.n_head, cfg.n_embd, cfg.n_hidden, cfg.n_kv_head or cfg.n_head
    hd, R, read = D // H, cfg.hc_rate, L * (L + 1) // 2 - 1                         # read: entries, over blocks 1..L-1
    block = T * (2 * D * D + 2 * D * Hkv * hd + 3 * D * M) + 4 * H * T * T * hd + 3 * H * T * T
    extra = {"llama": 0, "static": H * read * D, "dynamic": 2 * H * read * D, "kv": 2 * Hkv * Hkv * read * hd,
             "hc": 2 * L * D * (R * (R + 2) * cfg.hc_dynamic + R * (R + 1) + R)}[cfg.variant]
    return L * block + T * (cfg.vocab_size * D + extra)


PRESETS = {
    "tiny": dict(),
    "small": dict(n_layer=12, n_head=12, n_embd=768, n_hidden=2048, vocab_size=50257, block_size=1024),
    **{f"deep{L}": dict(n_layer=L, n_head=8, n_embd=256, n_hidden=1024, vocab_size=50257, block_size=2048)
       for L in (32, 64, 128)},
    "paper": dict(n_layer=16, n_head=32, n_embd=2048, n_hidden=8192, vocab_size=50257, block_size=2048),
}
