"""LIMe in one file: a LLaMA whose attention heads read a learned mixture of all earlier layers.

A block of a plain Transformer sees only what the block before it left, and late layers make distinct tokens
alike. LIMe (Layer-Integrated Memory, arXiv 2502.09245) keeps the stream that entered every block so far and
lets each head mix its keys and values from them all; queries still come from the current one.

Letters: B batch, T tokens, N = B*T, all tokens in one axis, V vocabulary, L blocks, D features (n_embd), M
in the MLP (n_hidden), H heads, Hkv key-value heads, hd = D/H features of a head; x_m: the stream that enters
block m, x_0 the embedding; block r reads m = 0..r. `python lime.py` prints the paper's tables beside ours.
"""
import math
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

@dataclass
class Config:
    variant: str = "static"       # llama, static, dynamic, kv, hc: a key of VARIANTS
    n_layer: int = 16             # L
    n_head: int = 4               # H
    n_kv_head: int = 0            # Hkv, divides H; 0: as many as H
    n_embd: int = 64              # D, a multiple of 2H
    n_hidden: int = 256           # M
    vocab_size: int = 257         # V
    block_size: int = 256         # the most tokens in a sequence
    kv_init: str = "small"        # small: wkv of blocks >= 1 starts in +-1/D; normal: std 0.02
    route_top_p: float = 1.0      # static: a head keeps the fewest weights that reach this sum; 1: all
    router_init: str = "uniform"  # kv, R of the blocks below: uniform (the authors'), zero (as llama)
    hc_rate: int = 4              # hc: residual streams
    hc_dynamic: bool = True       # hc: weights from the token as well
    rope_theta: float = 10000.0   # base of the rotary embedding's wavelengths
    norm_eps: float = 1e-6        # RMSNorm adds it to the mean square (hc's LayerNorm: 1e-5)

def normalise(x, eps):
    """RMSNorm without its gain, n = x / rms(x). The gain belongs to whoever reads n."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)     # F.rms_norm's backward is slower

def project(n, w, g):
    """(n * g) @ w.T, with the norm's gain g, (D,) or 1, multiplied into the smaller of n and w (out, D)."""
    return F.linear(n * g, w) if n.numel() < w.numel() else F.linear(n, w * g)

# ---- LIMe: what a block writes into the depth memory, and what its heads read from it -------------------
class Own(nn.Module):
    """LLaMA: keys and values from the block's own stream. VARIANTS, below, lists who reads what. The rows of
    wkv: hd for K of the first head, hd for its V, then the next head's."""
    def __init__(self, cfg, r):
        super().__init__()
        self.cfg, self.r = cfg, r
        self.wkv = nn.Parameter(torch.empty(cfg.n_kv_head * 2 * cfg.n_embd // cfg.n_head, cfg.n_embd))

    def read(self, n, g, memory):
        """Keys and values side by side, (Hkv, N, 2 hd), before rotation, of the block's normed input n (N, D)
        and its gain g. The other variants also write: they append rows (., N, .) to memory.new."""
        return project(n, self.wkv, g).unflatten(1, (self.cfg.n_kv_head, -1)).transpose(0, 1)

    def weights(self, n):
        """The router's weights of S rows: (H or Hkv, S), dynamic's (N, H, S); None without a router."""
        return getattr(self, "R", None)

class Stream(Own):
    """Block 0 of static and dynamic: reads itself, and writes its stream for the blocks above."""
    def read(self, n, g, memory):
        memory.new.append(n[None])                                   # one row (1, N, D)
        return super().read(n, g, memory)

class Static(Own):
    """LIMe v1, static router: a table R (H, r+1). A head mixes streams with the same weights for all tokens:

        a_h = softmax(R_h)        z_h = sum_m a_hm n_m        K_h, V_h = z_h W_h

    n_m = x_m / rms(x_m) is shared; the reader's own gain g_r goes into its W = wkv."""
    def __init__(self, cfg, r):
        super().__init__(cfg, r)
        self.gain = nn.Parameter(torch.ones(cfg.n_embd))             # g_r, apart from the gain of the query
        self.R = nn.Parameter(torch.empty(cfg.n_head, r + 1))

    def init_router(self):
        self.R.normal_(0, 0.1)

    def weights(self, n):
        """a (H, r+1), the same for every token; rows sum to 1."""
        a, top_p = self.R.softmax(-1), self.cfg.route_top_p
        if top_p < 1:                   # the smallest set that reaches top_p: the entry that crosses it stays
            p, order = a.detach().sort(dim=-1, descending=True)
            a = a * torch.zeros_like(a).scatter(-1, order, (p.cumsum(-1) - p < top_p).to(a.dtype))
            a = a / a.sum(-1, keepdim=True)
        return a

    def read(self, n, g, memory):
        memory.new.append(n[None])
        return memory.mix(self.weights(n), self.wkv.unflatten(0, (self.cfg.n_head, -1)), self.gain)

class Dynamic(Static):
    """LIMe v1, dynamic router: the same, with weights of each token's own, from a linear map W of its stream:

        a = softmax(W g_r n_r)    z_h = sum_m a_hm n_m        K_h, V_h = z_h W_h"""
    def __init__(self, cfg, r):
        super().__init__(cfg, r)
        self.R, self.W = None, nn.Parameter(torch.empty(cfg.n_head * (r + 1), cfg.n_embd))  # no table

    def init_router(self):
        self.W.normal_(0, 0.02)

    def weights(self, n):
        """a (N, H, r+1), in float32 under autocast."""
        if torch.is_autocast_enabled(n.device.type):         # asked first: entering costs time at each token
            with torch.autocast(n.device.type, enabled=False):
                return self.weights(n)
        return project(n, self.W, self.gain).view(-1, self.cfg.n_head, self.r + 1).softmax(-1)

class Pair(Own):
    """Block 0 of kv: reads its own keys and values, and writes them for the blocks above."""
    def read(self, n, g, memory):
        memory.new.append(super().read(n, g, memory))                # Hkv rows (Hkv, N, 2 hd)
        return memory.new[-1]

class KeyValue(Pair):
    """LIMe v2: keys and values are signed sums, no softmax, of those of all heads of all blocks so far:

        [K|V]_h = sum_m,j R[h, m Hkv + j] [k|v]_m,j                   R (Hkv, (r+1) Hkv)"""
    def __init__(self, cfg, r):
        super().__init__(cfg, r)
        self.R = nn.Parameter(torch.empty(cfg.n_kv_head, (r + 1) * cfg.n_kv_head))

    def init_router(self):
        Hkv, S = self.R.shape
        b = math.sqrt(3 / S) if self.cfg.router_init == "uniform" else 0.0   # std 1/sqrt(S)
        self.R.uniform_(-b, b)[:, S - Hkv:] = torch.eye(Hkv)         # identity on the block's own heads

    def read(self, n, g, memory):
        super().read(n, g, memory)
        i, S, Hkv = (self.r - 1) % GROUP, self.R.shape[1], len(self.R)
        if i == 0:      # the first of GROUP blocks mixes the rows so far for all; each adds the rows since
            R = [m.R[:, :S] for m in memory.modules[self.r:][:GROUP]]
            memory.ahead = memory.mix(torch.cat(R)).split(Hkv)
        return memory.ahead[i] + (memory.mix(self.R[:, S - i * Hkv:]) if i else 0)  # + 0: frees ahead

GROUP = 4                                # blocks whose rows kv reads at once
PIECE = 2 ** 20                          # numbers, about what a processor's cache holds

def pieces(n, width, size):
    """Slices of n tokens of width numbers each: about `size` numbers, and 8, 16, .. tokens if it can."""
    step = max(1, size // width // 8 * 8 or size // width)
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]

def batch(a, x):
    """x (rows, N, E) in G groups of tokens, (G, rows, N E / G): N for a (N, H, S), 8 if S > 2 H, else 1."""
    whole = a.shape[-1] <= 2 * a.shape[-2] or x.shape[1] % 8 or torch.compiler.is_compiling()
    G = len(a) if a.ndim == 3 else 1 if whole else 8    # one product with few weights uses one thread
    return x.reshape(len(x), G, -1).transpose(0, 1)

def mixture(a, x, w=None):
    """z_h = sum_m a_hm x_m, (H, N, E), of x (S, N, E); a (H, S) or, of each token's own, (N, H, S). With
    w (H, out, E) it is projected as well, z_h w_h^T: (H, N, out)."""
    b = batch(a, x.to(a.dtype))
    z = torch.bmm(a.expand(len(b), -1, -1), b).transpose(0, 1).reshape(-1, *x.shape[1:])
    return z if w is None else z.to(w.dtype) @ w.mT

class Memory:
    """The depth memory of one forward pass: a buffer of `rows` (L or L Hkv, N + 1, E), `used` of them filled;
    `new`, those not yet in it; `modules`, of all blocks; `ahead`, see KeyValue. Mix keeps no mixture."""
    def __init__(self, modules):
        self.modules, self.used, self.rows, self.new, self.ahead = modules, 0, None, [], None

    def mix(self, a, w=None, g=1):
        """mixture(a, x, w g) of the last rows x, as many as a has columns; g (D,), the reader's gain."""
        if torch.is_autocast_enabled(a.device.type):         # mix in float32, project in bfloat16 (g is in w)
            with torch.autocast(a.device.type, enabled=False):
                return self.mix(a, w if w is None else (w * g).to(torch.get_autocast_dtype(a.device.type)))
        new = self.new[-(a.shape[-1] // len(self.new[0])):]              # all, where there is no buffer
        if not torch.is_grad_enabled() and new[0].shape[1] < 16:         # few tokens: none, and z g, not w g
            z = mixture(a, torch.cat(new))
            return z if w is None else (z * g).to(w.dtype) @ w.mT
        w = w if w is None else w * g
        if torch.compiler.is_compiling():                    # the compiler sees plain tensors, no buffer
            return checkpoint(lambda *new: mixture(a, torch.cat(new), w), *new, use_reentrant=False)
        new = torch.cat(self.new).to(a.dtype)
        if self.rows is None:                                # N + 1: rows 2^k apart would share cache sets
            self.rows = a.new_empty(len(self.modules) * len(self.new[0]), new.shape[1] + 1, new.shape[2])
        self.rows, out = Mix.apply(self.rows, self.used, a, w, new)
        self.used, self.new = self.used + len(new), []
        return out

class Mix(torch.autograd.Function):
    """mixture on pieces of tokens that fit the processor's cache, made again in backward. `rows` goes in and
    out, so autograd hands one buffer of its gradient from the last reader to the first; each adds to it."""
    @staticmethod
    def forward(ctx, rows, used, a, w, new):
        ctx.rows, ctx.new = rows.detach(), slice(used, used + len(new))      # detached: later blocks write
        ctx.read = slice(ctx.new.stop - a.shape[-1], ctx.new.stop)
        rows[ctx.new, :-1] = new
        ctx.save_for_backward(a, w)
        ctx.mark_dirty(rows)
        ctx.set_materialize_grads(False)
        out = [mixture(a if a.ndim == 2 else a[c], rows[ctx.read, c], w)
               for c in pieces(new.shape[1], a.shape[-2] * new.shape[2], PIECE)]
        return rows, torch.cat(out, 1)

    @staticmethod
    def backward(ctx, grad, dout):
        assert not torch.is_grad_enabled(), "lime.Mix has first derivatives only"
        (a, w), rows, read = ctx.saved_tensors, ctx.rows, ctx.read
        grad = torch.zeros_like(rows) if grad is None else grad    # None at the last block that reads
        da, dw = torch.zeros_like(a), None if w is None else torch.zeros_like(w, dtype=a.dtype)
        for c in pieces(dout.shape[1], a.shape[-2] * rows.shape[2], PIECE):
            x, ac, dz = rows[read, c], a if a.ndim == 2 else a[c], dout[:, c]
            if w is not None:
                dw += dz.mT @ mixture(ac, x).to(w.dtype)
                dz = (dz @ w).to(a.dtype)
            if a.ndim == 2:
                da += (batch(a, dz) @ batch(a, x).mT).sum(0)
                grad[read, c].flatten(1).addmm_(a.T, dz.flatten(1))
            else:
                da[c] = batch(ac, dz) @ batch(ac, x).mT
                grad[read, c] += (ac.mT @ batch(ac, dz)).transpose(0, 1)
        return grad, None, da, dw, grad[ctx.new, :-1]              # complete: no earlier block reads these

# ---- the residual stream: LLaMA's, and that of the paper's other baseline -------------------------------
class Residual(nn.Module):
    """x + f(norm(x)); f multiplies by the norm's gain."""
    gain = True                                              # f has one to multiply by
    expand = staticmethod(lambda x, cfg: x)                  # streams from the embedding
    collapse = staticmethod(lambda x: x)                     # one stream again, (N, D)
    def __init__(self, cfg, r):
        super().__init__()
        self.cfg = cfg

    def forward(self, x, f):
        return x + f(normalise(x, self.cfg.norm_eps))

class HyperConnection(Residual):
    """Hyper-Connections (arXiv 2409.19606): R = hc_rate streams h (N, R, D). norm: LayerNorm without gain.

        alpha = A + s_a tanh(norm(h) W_a)   (R, R+1)      beta = b + s_b tanh(norm(h) w_b)   (R)
        m = alpha^T h   (R+1, D)                          h = beta f(norm(m_0)) + m_1..R"""
    gain = False
    expand = staticmethod(lambda x, cfg: x[:, None].repeat(1, cfg.hc_rate, 1))
    collapse = staticmethod(lambda h: h.sum(1))
    def __init__(self, cfg, r):
        super().__init__(cfg, r)
        R, D = cfg.hc_rate, cfg.n_embd
        self.A = nn.Parameter(torch.cat((torch.eye(R)[:, r % R, None], torch.eye(R)), 1))
        self.b = nn.Parameter(torch.ones(R))
        if cfg.hc_dynamic:
            self.Wa, self.wb = nn.Parameter(torch.zeros(D, R + 1)), nn.Parameter(torch.zeros(D))
            self.sa, self.sb = nn.Parameter(torch.full((1,), 0.01)), nn.Parameter(torch.full((1,), 0.01))

    def forward(self, h, f):
        shape, alpha, beta = h.shape[-1:], self.A, self.b                # of each token if dynamic
        if self.cfg.hc_dynamic:
            t = torch.tanh(F.linear(F.layer_norm(h, shape), torch.cat((self.Wa.T, self.wb[None]))))
            alpha, beta = alpha + self.sa * t[..., :-1], beta + self.sb * t[..., -1]
        with torch.autocast(h.device.type, enabled=False):               # streams stay float32, as Residual's
            m0, m = (alpha.mT @ h).split((1, h.shape[1]), 1)              # (N, 1, D), (N, R, D)
        return torch.addcmul(m, beta[..., None], f(F.layer_norm(m0[:, 0], shape))[:, None])

VARIANTS = {  # memory of block 0, memory of the blocks above, residual
    "llama":   (Own, Own, Residual),
    "static":  (Stream, Static, Residual),
    "dynamic": (Stream, Dynamic, Residual),
    "kv":      (Pair, KeyValue, Residual),
    "hc":      (Own, Own, HyperConnection),
}

# ---- the block ------------------------------------------------------------------------------------------
def rotate(x, cos, sin):
    """Rotary position embedding of x (..., T, hd): features i and i + hd/2 turn; cos, sin (T, hd)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)   # sin is negative for the first half

class Attention(nn.Module):
    """Causal attention. What its keys and values are made of is the memory's business alone."""
    def __init__(self, cfg, r):
        super().__init__()
        first, above, residual = VARIANTS[cfg.variant]
        self.H, self.gqa, D = cfg.n_head, cfg.n_kv_head < cfg.n_head, cfg.n_embd
        self.gain = nn.Parameter(torch.ones(D)) if residual.gain else 1.0
        self.wq, self.wo = nn.Parameter(torch.empty(D, D)), nn.Parameter(torch.empty(D, D))
        self.memory = (above if r else first)(cfg, r)                    # reads and writes the Memory

    def forward(self, n, memory, rope, cache, start, trace):
        T, g = len(rope[0]), self.gain
        q = project(n, self.wq, g).view(-1, T, self.H, n.shape[1] // self.H).transpose(1, 2)   # (B, H, T, hd)
        kv = self.memory.read(n, g, memory).unflatten(1, (-1, T))        # (Hkv, B, T, 2 hd)
        k, v = kv.transpose(0, 1).chunk(2, -1)                           # (B, Hkv, T, hd)
        if trace is not None:
            trace.setdefault("values", []).append(v)
            trace.setdefault("weights", []).append(self.memory.weights(n))
        q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is not None:                                            # (2, B, Hkv, block_size, hd)
            cache.narrow(3, start, T).copy_(torch.stack((k, v)))
            k, v = cache.narrow(3, 0, start + T)
        mask = torch.ones(T, start + T, device=n.device).tril(start).bool() if start and T > 1 else None
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not start and T > 1, enable_gqa=self.gqa)
        return F.linear(y.transpose(1, 2).reshape(n.shape), self.wo)

class MLP(nn.Module):
    """SwiGLU: w2 (silu(w1 n) * (w3 n))."""
    def __init__(self, cfg):
        super().__init__()
        D, M = cfg.n_embd, cfg.n_hidden
        self.gain = nn.Parameter(torch.ones(D)) if VARIANTS[cfg.variant][2].gain else 1.0
        self.w1, self.w3, self.w2 = (nn.Parameter(torch.empty(s)) for s in ((M, D), (M, D), (D, M)))

    def forward(self, n):
        n = n * self.gain
        return F.linear(F.silu(F.linear(n, self.w1)) * F.linear(n, self.w3), self.w2)

class Block(nn.Module):
    """Attention, then the MLP, each around the residual."""
    def __init__(self, cfg, r):
        super().__init__()
        self.attn, self.mlp = Attention(cfg, r), MLP(cfg)
        self.res1, self.res2 = (VARIANTS[cfg.variant][2](cfg, r) for _ in range(2))

    def forward(self, x, *args):
        return self.res2(self.res1(x, lambda n: self.attn(n, *args)), self.mlp)

# ---- the model ------------------------------------------------------------------------------------------
class LIMe(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        check(cfg)
        self.cfg = cfg = replace(cfg, n_kv_head=cfg.n_kv_head or cfg.n_head)
        self.embed = nn.Parameter(torch.empty(cfg.vocab_size, cfg.n_embd))                  # also the head
        self.blocks = nn.ModuleList(Block(cfg, r) for r in range(cfg.n_layer))
        self.gain = nn.Parameter(torch.ones(cfg.n_embd))                 # of the norm before the head
        hd = cfg.n_embd // cfg.n_head
        angle = torch.outer(torch.arange(cfg.block_size), cfg.rope_theta ** (torch.arange(0, hd, 2) / -hd))
        rope = torch.stack((angle.cos().repeat(1, 2), torch.cat((-angle.sin(), angle.sin()), 1)))  # cos, sin
        self.register_buffer("rope", rope, persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Matrices first, routers last: models of one seed share all that they have in common."""
        for name, p in self.named_parameters():
            if name.endswith("wkv") and self.cfg.kv_init == "small" and not name.startswith("blocks.0."):
                p.uniform_(-1 / self.cfg.n_embd, 1 / self.cfg.n_embd)
            elif name.endswith(("embed", "wq", "wkv", "wo", "w1", "w2", "w3")):
                p.normal_(0, 0.02)
        for m in (block.attn.memory for block in self.blocks):
            if hasattr(m, "init_router"):
                m.init_router()

    def hidden(self, idx, cache=None, start=0, trace=None):
        """The last stream, normalised, no gain, (B, T, D). A cache (no gradients): tokens from start on."""
        if idx.ndim != 2 or not idx.numel() or start + idx.shape[1] > self.cfg.block_size:
            raise ValueError(f"idx {tuple(idx.shape)} from position {start} on, expected (B, T), neither 0, "
                             f"at most block_size = {self.cfg.block_size} tokens in all")
        rope = self.rope[:, start:start + idx.shape[1]].unbind()
        memory, residual = Memory([b.attn.memory for b in self.blocks]), VARIANTS[self.cfg.variant][2]
        x = [residual.expand(F.embedding(idx.flatten(), self.embed), self.cfg)]
        for r, block in enumerate(self.blocks):
            x.append(block(x[-1], memory, rope, None if cache is None else cache[r], start, trace))
            x = x[-1:] if trace is None else x
        if trace is not None:
            trace["hidden"] = [residual.collapse(stream).view(*idx.shape, -1) for stream in x]
        return normalise(residual.collapse(x[-1]), self.cfg.norm_eps).view(*idx.shape, -1)

    def forward(self, idx, targets=None, trace=None):
        """(logits, None) of ids idx (B, T), T at most block_size: logits (B, T, V). (None, loss) with targets
        (B, T), all ids: mean cross-entropy in nats. A {} as trace gets lists: `hidden` (B, T, D), x_0 to x_L
        (hc: each the sum of its streams), `values` (B, Hkv, T, hd) and `weights`, the routers'."""
        n = self.hidden(idx, trace=trace)
        if targets is None:
            return project(n, self.embed, self.gain), None
        n, targets = (n * self.gain).flatten(0, 1), targets.view_as(idx).flatten()
        if torch.compiler.is_compiling():                    # which makes pieces of its own
            return None, F.cross_entropy(F.linear(n, self.embed), targets)
        return None, Loss.apply(n, self.embed, targets)

    def generate(self, idx, max_new_tokens, temperature=1, top_k=0, top_p=1, generator=None, n_vocab=None):
        """Yield max_new_tokens tokens (B,), ids below n_vocab, each drawn (see draw) after idx (B, T >= 1).
        The cache has each block's keys, rotated, and values. Beyond block_size a token costs a whole pass."""
        cfg, size = self.cfg, self.cfg.block_size
        cache = self.embed.new_empty(cfg.n_layer, 2, len(idx), cfg.n_kv_head, size, cfg.n_embd // cfg.n_head)
        new, start = idx[:, -size:], 0
        for _ in range(max_new_tokens):
            with torch.inference_mode():
                logits = project(self.hidden(new, cache, start)[:, -1], self.embed, self.gain)[:, :n_vocab]
            token = draw(logits, temperature, top_k, top_p, generator).to(idx.device)
            yield token
            idx, start = torch.cat((idx, token[:, None]), 1)[:, -size:], start + new.shape[1]
            new, start = (token[:, None], start) if start < size else (idx, 0)

def draw(logits, temperature=1, top_k=0, top_p=1, generator=None):
    """One token (B,) from logits (B, V), on the CPU: a seed gives one text on all devices. temperature 0: the
    likeliest; top_k > 0: among the k likeliest; top_p < 1: and the fewest of all that reach it."""
    logits = logits.float().cpu()
    if temperature == 0:
        return logits.argmax(-1)
    logits, order = logits.sort(-1, descending=True)
    p = ((logits - logits[:, :1]) / max(temperature, 1e-30)).softmax(-1)   # arguments <= 0: no overflow
    out = (p.cumsum(-1) - p >= top_p) & (top_p < 1)                      # never the first, as top_p > 0
    out[:, (top_k or logits.shape[1]):] = True
    return order.gather(-1, torch.multinomial(p.masked_fill(out, 0), 1, generator=generator))[:, 0]

class Loss(torch.autograd.Function):
    """Mean cross-entropy of logits n w^T with targets (N,); n (N, D), w (V, D). Forward makes a piece of the
    logits at a time and takes its gradients at once; backward only scales them."""
    @staticmethod
    def forward(ctx, n, w, targets):
        total, train, autocast = 0, ctx.needs_input_grad[0], torch.is_autocast_enabled(n.device.type)
        ctx.grads = dn, dw = (torch.empty_like(n), torch.zeros_like(w)) if train else (None, None)
        for c in pieces(len(n), len(w), 8 * PIECE):
            t, p = targets[c, None], (n[c] @ w.T).to(n.dtype).log_softmax(-1)
            total = total - p.gather(1, t).sum()
            if train:
                p.exp_().scatter_add_(1, t, -torch.ones_like(t, dtype=p.dtype))      # d loss / d logits
                dn[c] = p @ w
                dw.add_(p.T @ n[c]) if autocast else dw.addmm_(p.T, n[c])    # addmm_ has none
        return total / len(n)

    @staticmethod
    def backward(ctx, dloss):
        assert not torch.is_grad_enabled(), "lime.Loss has first derivatives only"
        return *(grad * (dloss / len(ctx.grads[0])) for grad in ctx.grads), None

# ---- sizes and what they cost ---------------------------------------------------------------------------
PRESETS = {
    "tiny": dict(),                                                      # a laptop; the others: GPT-2 tokens
    "small": dict(n_layer=12, n_head=12, n_embd=768, n_hidden=2048, vocab_size=50257, block_size=1024),
    **{f"deep{L}": dict(n_layer=L, n_head=8, n_embd=256, n_hidden=1024, vocab_size=50257, block_size=2048)
       for L in (32, 64, 128)},
    "paper": dict(n_layer=16, n_head=32, n_embd=2048, n_hidden=8192, vocab_size=50257, block_size=2048),
}

def check(cfg):
    """Raise ValueError, one line that names each field out of its range."""
    H, Hkv, p = max(1, cfg.n_head), cfg.n_kv_head or max(1, cfg.n_head), cfg.route_top_p
    choices = dict(variant=VARIANTS, kv_init=("small", "normal"), router_init=("uniform", "zero"))
    rules = [(k, 1 <= getattr(cfg, k) <= 10 ** 9, "1 to 10^9")
             for k in "n_layer n_head n_embd n_hidden vocab_size block_size hc_rate".split()]
    rules += [(k, getattr(cfg, k) in names, "one of " + ", ".join(names)) for k, names in choices.items()]
    rules += [("n_embd", cfg.n_embd % (2 * H) == 0, f"a multiple of 2 n_head = {2 * H}"),
              ("n_kv_head", Hkv > 0 and H % Hkv == 0, f"a divisor of n_head = {H}"),
              ("n_kv_head", Hkv == H or cfg.variant not in ("static", "dynamic"),
               f"n_head = {H} in static and dynamic, where each query head reads a mixture of its own"),
              ("route_top_p", p == 1 or 0 < p < 1 and cfg.variant == "static", "in (0, 1], 1 if not static"),
              ("rope_theta", 0 < cfg.rope_theta < math.inf, "above 0, finite"),
              ("norm_eps", 0 <= cfg.norm_eps < 1, "in [0, 1)")]
    if wrong := [f"{k} is {getattr(cfg, k)!r}, expected {what}" for k, fine, what in rules if not fine]:
        raise ValueError("; ".join(wrong))

if __name__ == "__main__":
    import bench
    bench.prepare.run(bench.tables)
