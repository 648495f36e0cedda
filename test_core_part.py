"""
Tests of lime.py, the data tools, train.py, sample.py and analyze.py: offline, on a CPU, leaving no files.

    pytest test_lime.py             the fast ones, under a minute
    pytest test_lime.py -m slow     kills, full disks, two processes, corrupted files, long runs: minutes

The golden numbers of test_lime.npz come from running the code that the paper's authors published, and the transformers
library's LLaMA, on small models with random weights.
"""
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import bench
import lime

HERE = Path(__file__).resolve().parent
VARIANTS = sorted(lime.VARIANTS)
SMALL = dict(n_layer=4, n_head=4, n_embd=16, n_hidden=24, vocab_size=29, block_size=12)


def toy(variant, noise=0.3, **fields):
    """A small float64 model whose every parameter is random, zeros of the start included."""
    torch.manual_seed(0)
    model = lime.LIMe(lime.Config(variant, **{**SMALL, **fields})).double()
    for p in model.parameters():
        p.data += noise * torch.randn_like(p)
    half = model.cfg.n_embd // model.cfg.n_head // 2
    angle = torch.arange(model.cfg.block_size).double()[:, None] * 10000.0 ** (torch.arange(half).double() / -half)
    model.cos, model.sin = angle.cos(), angle.sin()                  # the tables of a float32 model are float32
    return model


def ids(B=2, T=12, V=29, seed=1):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------------------
# the equations again, as slow loops that share no code with lime.py

def rms(x, gain):
    return [v * g / math.sqrt(sum(u * u for u in x) / len(x) + 1e-6) for v, g in zip(x, gain)]


def layernorm(x):
    mean = sum(x) / len(x)
    return [(v - mean) / math.sqrt(sum((u - mean) ** 2 for u in x) / len(x) + 1e-5) for v in x]


def matvec(w, x):
    return [sum(a * b for a, b in zip(row, x)) for row in w]


def softmax(x):
    e = [math.exp(v - max(x)) for v in x]
    return [v / sum(e) for v in e]


def turn(x, position, theta):
    half = len(x) // 2
    out = list(x)
    for i in range(half):
        c, s = math.cos(position * theta ** (-i / half)), math.sin(position * theta ** (-i / half))
        out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s
    return out


def keep_top_p(a, p):
    kept, total = [], 0.0
    for m in sorted(range(len(a)), key=lambda m: -a[m]):
        if total < p:
            kept.append(m)
            total += a[m]
    return [v / total if m in kept else 0.0 for m, v in enumerate(a)]


def slow_logits(model, tokens):
    """Logits of one sequence, number by number, from the weights by name alone."""
    c, W = model.cfg, {k: v.tolist() for k, v in model.state_dict().items()}
    T, H, Hkv, hd, D = len(tokens), c.n_head, c.n_kv_head, c.n_embd // c.n_head, c.n_embd
    x = [[W["embed"][t]] * (c.hc_rate if c.variant == "hc" else 1) for t in tokens]      # streams of each token
    depth = []                                                       # depth[m][t]: representation or own key-values
    for r in range(c.n_layer):
        w = {k.split(".", 2)[2]: v for k, v in W.items() if k.startswith(f"blocks.{r}.")}
        for part in ("attn", "mlp"):
            res = "res1." if part == "attn" else "res2."
            inputs, rest = [], []
            for t in range(T):
                if c.variant != "hc":
                    inputs.append(x[t][0])
                    rest.append(([1.0], [x[t][0]]))
                    continue
                R, A, b = c.hc_rate, [list(row) for row in w[res + "A"]], list(w[res + "b"])
                if c.hc_dynamic:
                    for i in range(R):
                        n = layernorm(x[t][i])
                        for j in range(R + 1):
                            z = sum(n[d] * w[res + "Wa"][d][j] for d in range(D))
                            A[i][j] += w[res + "sa"][0] * math.tanh(z)
                        b[i] += w[res + "sb"][0] * math.tanh(sum(n[d] * w[res + "wb"][d] for d in range(D)))
                mix = [[sum(A[i][j] * x[t][i][d] for i in range(R)) for d in range(D)] for j in range(R + 1)]
                inputs.append(mix[0])
                rest.append((b, mix[1:]))
            if part == "attn":
                norm = [layernorm(v) if c.variant == "hc" else rms(v, w["attn.gain"]) for v in inputs]
                if c.variant in ("static", "dynamic"):
                    depth.append(inputs)
                wkv = w["attn.memory.wkv"]
                k = [[None] * Hkv for _ in range(T)]
                v = [[None] * Hkv for _ in range(T)]
                own = [[matvec(wkv[h * 2 * hd:(h + 1) * 2 * hd], norm[t]) for h in range(Hkv)] for t in range(T)]
                if c.variant == "kv":
                    depth.append(own)
                for t in range(T):
                    for h in range(Hkv):
                        if c.variant in ("llama", "hc") or r == 0:
                            pair = own[t][h]
                        elif c.variant == "kv":
                            pair = [sum(w["attn.memory.R"][h][m * Hkv + j] * depth[m][t][j][e]
                                        for m in range(r + 1) for j in range(Hkv)) for e in range(2 * hd)]
                        else:
                            g = w["attn.memory.gain"]
                            if c.variant == "static":
                                a = softmax(w["attn.memory.R"][h])
                                a = keep_top_p(a, c.route_top_p) if c.route_top_p < 1 else a
                            else:
                                n = rms(depth[r][t], g)
                                a = softmax(matvec(w["attn.memory.W"][h * (r + 1):(h + 1) * (r + 1)], n))
                            past = [rms(depth[m][t], g) for m in range(r + 1)]
                            z = [sum(a[m] * past[m][d] for m in range(r + 1)) for d in range(D)]
                            pair = matvec(wkv[h * 2 * hd:(h + 1) * 2 * hd], z)
                        k[t][h], v[t][h] = turn(pair[:hd], t, c.rope_theta), pair[hd:]
                out = []
                for t in range(T):
                    q, heads = matvec(w["attn.wq"], norm[t]), []
                    for h in range(H):
                        qh, j = turn(q[h * hd:(h + 1) * hd], t, c.rope_theta), h * Hkv // H
                        p = softmax([sum(a * b for a, b in zip(qh, k[u][j])) / math.sqrt(hd) for u in range(t + 1)])
                        heads += [sum(p[u] * v[u][j][e] for u in range(t + 1)) for e in range(hd)]
                    out.append(matvec(w["attn.wo"], heads))
            else:
                out = []
                for t in range(T):
                    n = layernorm(inputs[t]) if c.variant == "hc" else rms(inputs[t], w["mlp.gain"])
                    gate, up = matvec(w["mlp.w1"], n), matvec(w["mlp.w3"], n)
                    out.append(matvec(w["mlp.w2"], [a / (1 + math.exp(-a)) * b for a, b in zip(gate, up)]))
            x = [[[b * y + s for y, s in zip(out[t], stream)] for b, stream in zip(*rest[t])] for t in range(T)]
    return [matvec(W["embed"], rms([sum(s) for s in zip(*x[t])], W["gain"])) for t in range(T)]


@pytest.mark.parametrize("variant, fields", [
    ("llama", {}), ("llama", dict(n_kv_head=2)), ("static", {}), ("static", dict(route_top_p=0.6)), ("dynamic", {}),
    ("kv", {}), ("kv", dict(n_kv_head=2)), ("hc", {}), ("hc", dict(hc_dynamic=False, n_kv_head=1)), ("hc", dict(hc_rate=2))])
def test_equations_as_slow_loops(variant, fields):
    """Catches any departure from the equations: softmax over the wrong axis, the wrong layer, gain, head or rotation."""
    model = toy(variant, **{**SMALL, **dict(n_layer=3, n_embd=8, n_hidden=6, vocab_size=7), **fields})
    idx = ids(2, 5, 7)
    want = torch.tensor([slow_logits(model, row.tolist()) for row in idx], dtype=torch.float64)
    torch.testing.assert_close(model(idx)[0], want, atol=1e-9, rtol=1e-9)


# ---------------------------------------------------------------------------------------------------------------
# the authors' numbers

def golden_cases():
    """(name, read): read(key) gives an array of the case. Size C is packed beside this file, others may lie near it."""
    packed = np.load(HERE / "test_lime.npz")
    names = sorted({key.split("|")[0] for key in packed.files})
    cases = [(name, lambda key, name=name: packed[f"{name}|{key}"] if f"{name}|{key}" in packed.files else None)
             for name in names]
    for path in sorted((HERE.parent / "shared" / "golden").glob("*.npz")):
        if path.stem not in names and "start2" not in path.stem:
            cases.append((path.stem, lambda key, z=np.load(path): z[key] if key in z.files else None))
    return cases


def golden_config(read):
    case = json.loads(str(read("config")))
    size, extra, name = case["llama"], case["extra"] if "extra" in case else {}, case["case"]
    variant = next(v for prefix, v in dict(llama="llama", v1_dynamic="dynamic", v1="static", v2="kv", hc="hc").items()
                   if name.startswith(prefix))
    return lime.Config(
        variant, size["num_hidden_layers"], size["num_attention_heads"], size["num_key_value_heads"],
        size["hidden_size"], size["intermediate_size"], size["vocab_size"], size["max_position_embeddings"],
        route_top_p=(extra.get("top_p") or 1.0), hc_rate=extra.get("rate", 4), hc_dynamic=extra.get("dynamic", True),
        rope_theta=size["rope_theta"], norm_eps=size["rms_norm_eps"])


def ours(read, prefix, cfg):
    """The authors' tensors (read(prefix + their name)) under our names, in our layouts, for those that exist."""
    D, hd, Hkv = cfg.n_embd, cfg.n_embd // cfg.n_head, cfg.n_kv_head
    out = {}

    def put(name, value, layout=lambda x: x):
        if value is not None and all(v is not None for v in value):
            out[name] = torch.from_numpy(np.ascontiguousarray(layout(*value)))
    put("embed", [read(prefix + "model.embed_tokens.weight")])
    put("gain", [read(prefix + "model.norm.weight")])
    for r in range(cfg.n_layer):
        def get(name):
            return [read(f"{prefix}model.layers.{r}.{name}")]
        b = f"blocks.{r}."
        for name, theirs in {
                "attn.gain": "input_layernorm.weight", "mlp.gain": "post_attention_layernorm.weight",
                "attn.wo": "self_attn.o_proj.weight", "mlp.w1": "mlp.gate_proj.weight",
                "mlp.w3": "mlp.up_proj.weight", "mlp.w2": "mlp.down_proj.weight",
                "attn.memory.gain": "input_layernorm_lime.weight", "attn.memory.W": "attention_router.dynamic_proj.0.weight"}.items():
            put(b + name, get(theirs))
        for theirs in ("q_proj", "q_proj_default"):
            put(b + "attn.wq", get(f"self_attn.{theirs}.weight"))
        for theirs in ("attention_router", "self_attn.lime_router"):
            put(b + "attn.memory.R", get(f"{theirs}.static_weights"))
        for res, theirs in (("res1", "hc_attn"), ("res2", "hc_mlp")):
            for name, t in dict(A="static_alpha", b="static_beta", Wa="dynamic_alpha_fn", wb="dynamic_beta_fn",
                                sa="dynamic_alpha_scale", sb="dynamic_beta_scale").items():
                put(b + res + "." + name, get(theirs + "." + t))
        wkv = b + "attn.memory.wkv"                                  # ours: of each head, hd rows of K and hd of V
        put(wkv, get("self_attn.k_proj.weight") + get("self_attn.v_proj.weight"), lambda k, v: np.concatenate(
            (k.reshape(Hkv, hd, D), v.reshape(Hkv, hd, D)), 1).reshape(-1, D))
        put(wkv, get("self_attn.k_proj_lime.lime_kv_proj") + get("self_attn.v_proj_lime.lime_kv_proj"),
            lambda k, v: np.concatenate((k[0], v[0]), 2).transpose(0, 2, 1).reshape(-1, D))
        put(wkv, get("self_attn.kv_proj_weight"), lambda w: w.reshape(2 * hd, Hkv, D).transpose(1, 0, 2).reshape(-1, D))
    return out


@pytest.mark.parametrize("name, read", golden_cases(), ids=[name for name, _ in golden_cases()])
def test_golden_numbers_of_the_authors(name, read):
    """Catches a model, loss or gradient that is not the authors' (or transformers', for llama)."""
    cfg = golden_config(read)
    model = lime.LIMe(cfg)
    model.load_state_dict(ours(read, "param/", cfg))                 # strict: every parameter of ours has one of theirs
    logits, loss = model(torch.from_numpy(read("input_ids")), torch.from_numpy(read("targets")))
    loss.backward()
    loose = 10 if "hc_dynamic" in name else 1                        # float32 alone is off by 2e-5 and 4e-4 there
    assert (logits - torch.from_numpy(read("logits"))).abs().max() < loose * 1e-5
    assert abs(loss.item() - float(read("loss"))) < 1e-6
    grads, mine = ours(read, "grad/", cfg), dict(model.named_parameters())
    assert len(grads) >= 3
    for key, grad in grads.items():
        assert (mine[key].grad - grad).abs().max() < loose * 1e-4 * grad.abs().max(), key
    if cfg.route_top_p < 1:
        for r in range(1, cfg.n_layer):
            kept = torch.from_numpy(read(f"buffer/model.layers.{r}.attention_router.top_p_weights")) > 0
            assert torch.equal(model.blocks[r].attn.memory.weights(None) > 0, kept)


# ---------------------------------------------------------------------------------------------------------------
# identities, causality, cache

@pytest.mark.parametrize("variant", VARIANTS)
def test_no_token_sees_the_future(variant):
    """Catches attention or routing that lets a later token change an earlier one's logits, or ignores an earlier one."""
    model, idx = toy(variant), ids()
    before = model(idx)[0]
    idx[:, 7] = (idx[:, 7] + 1) % 29
    changed = (model(idx)[0] - before).abs().amax((0, 2))
    assert (changed[:7] == 0).all() and (changed[7:] > 1e-9).all()


def copy_shared(source, target):
    """The weights of the names that both models have."""
    shared = target.state_dict()
    shared.update({k: v for k, v in source.state_dict().items() if k in shared})
    target.load_state_dict(shared)


def test_static_that_reads_the_last_only_is_llama():
    """Catches a router that mixes before or after the wrong norm: one-hot on the block's own stream must be llama."""
    llama, static = toy("llama"), toy("static")
    copy_shared(llama, static)
    for block in list(static.blocks)[1:]:
        block.attn.memory.gain.data.copy_(block.attn.gain)
        block.attn.memory.R.data.fill_(-1e4)[:, -1] = 0
    torch.testing.assert_close(static(ids())[0], llama(ids())[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_kv_with_identity_router_is_llama(n_kv_head):
    """Catches a start of R whose identity is in the wrong block, and a `zero` start that is not exactly llama."""
    torch.manual_seed(0)
    llama = lime.LIMe(lime.Config("llama", n_kv_head=n_kv_head, **SMALL))
    torch.manual_seed(0)
    kv = lime.LIMe(lime.Config("kv", n_kv_head=n_kv_head, router_init="zero", **SMALL))
    assert torch.equal(kv(ids())[0], llama(ids())[0])
    uniform = lime.LIMe(lime.Config("kv", n_kv_head=n_kv_head, **SMALL)).blocks[3].attn.memory.R.detach()
    assert torch.equal(uniform[:, -n_kv_head:], torch.eye(n_kv_head))
    bound = math.sqrt(3 / (4 * n_kv_head))
    assert bound / 2 < uniform[:, :-n_kv_head].abs().max() <= bound


def test_hyper_connection_of_one_static_stream_is_a_residual():
    """Catches a Hyper-Connection whose start or sum is not that of x + f(LayerNorm(x))."""
    cfg = lime.Config("hc", hc_rate=1, hc_dynamic=False, **SMALL)
    res, x, w = lime.HyperConnection(cfg, 3), torch.randn(2, 5, 16), torch.randn(16, 16)
    out = res.collapse(res(res.expand(x, cfg), lambda n: n @ w))
    torch.testing.assert_close(out, x + torch.nn.functional.layer_norm(x, (16,)) @ w)
    A = lime.HyperConnection(replace(cfg, hc_rate=4), 5).A
    assert torch.equal(A, torch.cat((torch.eye(4)[:, 1:2], torch.eye(4)), 1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_cache_changes_nothing(variant):
    """Catches a cache that drops, shifts or turns a key twice, at every edge of the block, one token or many at a time."""
    model = toy(variant, n_kv_head=2 if variant in ("llama", "kv", "hc") else 4)
    hd, idx = 4, ids(3)
    for T in (1, 11, 12):
        for steps in ([T], [1] * T, [T // 2, T - T // 2]):
            cache, done, out = torch.empty(4, 2, 3, model.cfg.n_kv_head, 12, hd, dtype=torch.float64), 0, []
            for n in filter(None, steps):
                out.append(model.hidden(idx[:, done:done + n], cache, done))
                done += n
            torch.testing.assert_close(torch.cat(out, 1), model.hidden(idx[:, :T]), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_text_is_the_text_without_a_cache(variant):
    """Catches generation that goes wrong past block_size, in a batch, or from a prompt longer than the block."""
    model = toy(variant)
    for prompt in (ids(2, 1), ids(2, 15)):
        text = prompt
        for token in model.generate(prompt, 20, temperature=0):
            want = model(text[:, -12:])[0][:, -1].argmax(-1)
            assert torch.equal(token, want)
            text = torch.cat((text, token[:, None]), 1)


def test_draw():
    """Catches top_k, top_p or temperature that keep or drop the wrong tokens."""
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.15, 0.25]])).repeat(2000, 1)
    g = torch.Generator().manual_seed(0)

    def drawn(*args):
        return lime.draw(logits, *args, generator=g).bincount(minlength=4) / 2000
    assert (drawn(1.0) - torch.tensor([0.1, 0.5, 0.15, 0.25])).abs().max() < 0.04
    assert (drawn(0.5) - torch.tensor([0.01, 0.25, 0.0225, 0.0625]) / 0.345).abs().max() < 0.04
    assert drawn(1.0, 2).gt(0).tolist() == [False, True, False, True]
    assert drawn(1.0, 0, 0.7).gt(0).tolist() == [False, True, False, True]        # the one that crosses 0.7 stays
    assert drawn(1.0, 0, 1e-6).tolist() == [0, 1, 0, 0] and drawn(0).tolist() == [0, 1, 0, 0]


# ---------------------------------------------------------------------------------------------------------------
# routers, start, memory

def test_top_p():
    """Catches pruning that drops the crossing entry, is not renormalised, goes stale, or lets gradient through."""
    model = toy("static", route_top_p=0.9)
    router = model.blocks[3].attn.memory
    for p in ([0.6, 0.25, 0.1, 0.05], [0.05, 0.1, 0.25, 0.6]):      # changed in between: recomputed in every forward
        router.R.data.copy_(torch.tensor(p).log())
        kept = torch.tensor([v > 0.06 for v in p])
        want = torch.where(kept, torch.tensor(p, dtype=torch.float64), 0.0) / 0.95
        torch.testing.assert_close(router.weights(None), want.expand(4, 4), atol=1e-7, rtol=1e-6)
        model.zero_grad()
        model(ids(), ids(seed=2))[1].backward()
        assert (router.R.grad[:, kept].abs() > 0).all() and router.R.grad[:, ~kept].abs().max() < 1e-15
    off, on = toy("static"), toy("static", route_top_p=1.0)
    assert torch.equal(off(ids())[0], on(ids())[0])


@pytest.mark.parametrize("kv_init", ["small", "normal"])
def test_start(kv_init):
    """Catches a start with the wrong spread anywhere, or that differs between variants of one seed (unpaired runs)."""
    models = {}
    for variant in VARIANTS:
        torch.manual_seed(5)
        models[variant] = lime.LIMe(lime.Config(variant, n_embd=64, kv_init=kv_init))
    for name, p in models["llama"].named_parameters():
        for variant, model in models.items():
            if name in dict(model.named_parameters()):
                assert torch.equal(p, dict(model.named_parameters())[name]), (variant, name)
        if name.endswith("gain"):
            assert (p == 1).all()
        elif name.endswith("wkv") and kv_init == "small" and "blocks.0." not in name:
            assert 0.95 / 64 < p.abs().max() <= 1 / 64 and abs(p.std() * 64 * math.sqrt(3) - 1) < 0.03
        else:
            assert abs(p.std() / 0.02 - 1) < 0.03 and p.abs().max() > 0.05
    R = torch.cat([b.attn.memory.R.flatten() for b in list(models["static"].blocks)[1:]])
    assert abs(R.std() / 0.1 - 1) < 0.15
    W = torch.cat([b.attn.memory.W.flatten() for b in list(models["dynamic"].blocks)[1:]])
    assert abs(W.std() / 0.02 - 1) < 0.03
    for model in models.values():
        assert not hasattr(model.blocks[0].attn.memory, "R") and not hasattr(model.blocks[0].attn.memory, "W")


@pytest.mark.parametrize("variant", ["static", "dynamic", "kv"])
def test_gradients_in_pieces(variant, monkeypatch):
    """Catches a hand-written backward that is not the derivative, in one piece or many, or when it runs twice."""
    model, loss = toy(variant), None
    params = list(model.parameters())

    def grads(twice=False):
        loss = model(ids(), ids(seed=2))[1]
        first = torch.autograd.grad(loss, params, retain_graph=twice)
        return torch.autograd.grad(loss, params) if twice else first
    whole = grads()
    monkeypatch.setattr(lime.Mix, "size", 5 * 4 * 16)                # a few tokens a piece, and a rest
    pieces, again = grads(), grads(twice=True)


    class Plain:                                                     # the compiled path, with autograd's own backward
        def __init__(self, size):
            self.rows = []
            self.append, self.mix = self.rows.append, lambda a, w=None: lime.mix_plain(a, w, *self.rows)
    monkeypatch.setattr(lime, "Memory", Plain)
    plain = grads()
    for a, b, c, d in zip(whole, pieces, again, plain):
        for other in (b, c, d):
            torch.testing.assert_close(a, other, atol=1e-12, rtol=1e-10)
    monkeypatch.undo()
    p = model.blocks[2].attn.memory.R if variant != "dynamic" else model.blocks[2].attn.memory.W
    with torch.no_grad():                                            # and one number by finite difference
        ends = []
        for step in (1e-5, -1e-5):
            p[1, 1] += step
            ends.append(model(ids(), ids(seed=2))[1].item())
            p[1, 1] -= step
    slope = (ends[0] - ends[1]) / 2e-5
    assert abs(whole[[q is p for q in params].index(True)][1, 1].item() - slope) < 1e-7 + 1e-5 * abs(slope)


def saved_bytes(model):
    return bench.saved_bytes(model, ids(2, 64, model.cfg.vocab_size))


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_activations_grow_linearly_with_depth(variant):
    """Catches a block that keeps a copy of the memory, or its heads' mixtures, for backward."""
    sizes = {}
    for v in ("llama", variant):
        sizes[v] = [saved_bytes(lime.LIMe(lime.Config(v, n_layer=L, n_embd=32, n_hidden=64))) for L in (4, 8, 16)]
    a, b, c = sizes[variant]
    routers = 2 * 64 * 4 * 4 * sum(range(9, 17)) if variant == "dynamic" else 0    # a token's weights grow with depth
    assert c - b < 2.02 * (b - a) + 2 * routers
    if variant in ("static", "dynamic"):
        extra = c - sizes["llama"][2]
        weights = 2 * 64 * 4 * 4 * (16 * 17 // 2 - 1)
        assert extra <= 17 * 2 * 64 * 32 * 4 + (2 * weights if variant == "dynamic" else 0) + 20_000


def test_counts_of_the_paper():
    """Catches a parameter too many or too few, and a FLOP count off the paper's table 6."""
    def paper(variant, **fields):
        with torch.device("meta"):
            return lime.LIMe(lime.Config(variant, **{**lime.PRESETS["paper"], **fields}))
    want = {("llama",): 1_176_735_744, ("static",): 1_176_770_784, ("dynamic",): 1_185_613_824,
            ("kv",): 1_176_873_984, ("hc",): 1_177_064_256}
    for (variant,), n in want.items():
        assert lime.n_params(paper(variant)) == n, variant
    assert lime.n_params(paper("hc", hc_rate=2)) == 1_176_932_672
    assert lime.n_params(paper("hc", hc_dynamic=False)) == 1_176_670_976
    for variant, tera in dict(llama=2.97, static=2.98, dynamic=3.01, hc=2.98).items():
        assert abs(lime.forward_flops(lime.Config(variant, **lime.PRESETS["paper"]), 2048) / 1e12 - tera) < 0.01


def test_tables():
    """Catches `python lime.py` failing, or its tables losing a number of the paper."""
    out = subprocess.run([sys.executable, "lime.py"], cwd=HERE, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0 and not out.stderr
    for word in "1,176,735,744 1,176,770,784 1,185,613,824 1,176,873,984 1,177,064,256 7,936 4,216 0.75%".split():
        assert word in out.stdout, word


def test_one_graph():
    """Catches a graph break: torch.compile must make one graph of the whole model, once, and give the same loss."""
    from torch._dynamo.testing import CompileCounter
    for variant in VARIANTS:
        torch._dynamo.reset()
        counter, model = CompileCounter(), toy(variant)
        fast = torch.compile(model, backend=counter, fullgraph=True)
        for seed in range(3):
            loss = fast(ids(seed=seed), ids(seed=9))[1]
            loss.backward()
            torch.testing.assert_close(loss, model(ids(seed=seed), ids(seed=9))[1])
        assert counter.frame_count == 1, variant


@pytest.mark.parametrize("variant", VARIANTS)
def test_overfits_one_batch(variant):
    """Catches parameters that get no or wrong gradient: a small model must learn one batch by heart."""
    torch.manual_seed(0)
    model = lime.LIMe(lime.Config(variant, **{**SMALL, "n_embd": 32}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model(ids(), ids(seed=3))[1]
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.1


@pytest.mark.parametrize("variant", VARIANTS)
def test_half_precision(variant):
    """Catches bfloat16 autocast that crashes, or mixes and normalises in it and drifts far from float32."""
    model = toy(variant, noise=0.1).float()
    loss = model(ids(), ids(seed=2))[1]
    with torch.autocast("cpu", torch.bfloat16):
        half = model(ids(), ids(seed=2))[1]
    half.backward()
    assert half.dtype == torch.float32 and abs(half - loss) < 0.03


def test_trace():
    """Catches a read-out that is not what the model used, or changes its result."""
    for variant in VARIANTS:
        model, trace = toy(variant), {}
        assert torch.equal(model(ids(), trace=trace)[0], model(ids())[0])
        assert len(trace["hidden"]) == 5 and trace["hidden"][4].shape == (2, 12, 16)
        assert len(trace["values"]) == len(trace["weights"]) == 4 and trace["values"][1].shape == (2, 4, 12, 4)
        assert trace["weights"][0] is None
        if variant in ("static", "dynamic"):
            assert torch.allclose(trace["weights"][3].sum(-1), torch.ones(1, dtype=torch.float64))
    last = lime.normalise(trace["hidden"][4], 1e-6) * model.gain
    torch.testing.assert_close(last @ model.embed.T, model(ids())[0])


@pytest.mark.parametrize("fields", [
    dict(variant="limo"), dict(n_layer=0), dict(n_head=3), dict(n_embd=20), dict(n_kv_head=3), dict(n_kv_head=-1),
    dict(variant="static", n_kv_head=2), dict(variant="dynamic", n_kv_head=1), dict(route_top_p=0), dict(route_top_p=1.1),
    dict(route_top_p=float("nan")), dict(variant="llama", route_top_p=0.5), dict(kv_init="big"), dict(hc_rate=0),
    dict(rope_theta=-1), dict(norm_eps=float("nan"))])
def test_unfit_sizes_are_refused(fields):
    """Catches sizes that would fail deep inside, or silently do something else, instead of one line that names them."""
    with pytest.raises(ValueError, match="expected|which only") as e:
        lime.LIMe(lime.Config(**{**SMALL, **fields}))
    assert "\n" not in str(e.value) and any(name in str(e.value) for name in fields)


@pytest.mark.parametrize("variant", VARIANTS)
def test_deep_models_learn(variant):
    """Catches a start or a sum over depth that blows up at 128 blocks."""
    torch.manual_seed(0)
    model = lime.LIMe(lime.Config(variant, **{**SMALL, "n_layer": 128, "n_head": 2}))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(5):
        loss = model(ids(), ids(seed=3))[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_deep_preset_takes_twenty_steps(variant):
    """Catches the preset of 128 blocks failing to build, to step, or to go down in 20 steps."""
    torch.manual_seed(0)
    model = lime.LIMe(
        replace(lime.Config(variant, **lime.PRESETS["deep128"]), vocab_size=257))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-4), []
    for _ in range(20):
        loss = model(ids(1, 16, 257), ids(1, 16, 257, seed=3))[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]
