"""Tests of analyze.py: figures of toy runs, read through the numbers beside them."""
import importlib.util
import json
import math
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch

import lime
import train
from data import prepare

pytest.importorskip("matplotlib", reason="the figures need matplotlib")
pytest.importorskip("sklearn", reason="t-SNE and the folds need scikit-learn")
import analyze
from matplotlib.backends import backend_agg

FIG_TEXT = "the quick brown fox is in a house, uneven odes are said to be over a lazy dog. " * 60
FIG_RUNS = "llama static dynamic kv hc planted pruned".split()


@pytest.fixture(scope="module")
def fig_toys(tmp_path_factory):
    """Folder with runs of 3 blocks, 2 heads: FIG_RUNS, and foreign, of other data; all but hc logged."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("toys")
    (folder / "text.txt").write_text(FIG_TEXT)
    prepare.prepare_files([folder / "text.txt"], "set", "bytes", folder)
    data = prepare.load(str(folder / "set"), 16)
    for name in [*FIG_RUNS, "foreign"]:
        torch.manual_seed(len(name))
        variant = dict(planted="static", pruned="static", foreign="llama").get(name, name)
        cfg = lime.Config(variant, 3, 2, 2, 8, 16, 257, 16, route_top_p=0.6 if name == "pruned" else 1.0)
        model = lime.LIMe(cfg)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
            if name == "planted":
                model.blocks[2].attn.memory.R.copy_(torch.tensor([[50., 0, 0]] * 2))
        settings = asdict(train.Settings(dataset=str(folder / "set"), seed=1 + (name == "planted")))
        run = folder / name
        run.mkdir()
        train.save(run / "ckpt.pt", dict(format=1, step=2, best=3.0, skipped=0, model=model.state_dict(),
                                         config=asdict(model.cfg), settings=settings, tokenizer="bytes",
                                         data="other" if name == "foreign" else data.fingerprint))
        if name != "hc":
            loss = dict(llama=4.0, static=3.0, planted=3.5).get(name, 5.0)
            lines = [dict(kind="run", step=0, settings=settings, config=asdict(model.cfg), flops_per_token=7)]
            lines += [dict(kind=k, step=i, tokens=128 * i, loss=loss - i) for i in (0, 1, 2) for k in ("train", "eval")]
            (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "ev')
    return folder


@pytest.fixture(scope="module")
def fig_drawn(fig_toys):
    """Folder with the figures of the toy runs but those of single tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analyze, "WINDOWS", 4)
        patch.setattr(analyze, "OCCURRENCES", 8)
        with pytest.MonkeyPatch.context() as quick:              # without pictures, which cost the most time
            quick.setattr(backend_agg.FigureCanvasAgg, "draw", lambda self: None)
            quick.setattr(analyze.plt.Figure, "savefig", lambda self, path, **kwargs: open(path, "wb").close())
            analyze.main([*(str(fig_toys / name) for name in FIG_RUNS), f"--figures={fig_toys / 'figures'}",
                          "--device=cpu", "--only=loss,retrieval,deep,pruning,circuits,entropy"])
        yield fig_toys / "figures"


def fig_numbers(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def fig_weights(folder, name):
    """Of the blocks 1 and 2 the weights in figure 13's numbers, without the places beyond the block's own stream."""
    return [None] + [[row[:r + 1] for row in w] for r, w in enumerate(fig_numbers(folder, f"fig13_weights_{name}"), 1)]


def fig_model(toys, name):
    ckpt = train.load_run(toys / name / "ckpt.pt")
    model = lime.LIMe(lime.Config(**ckpt["config"])).eval()
    model.load_state_dict(ckpt["model"])
    return model


def fig_windows(toys):
    """The validation windows that the figures read, (4, 16)."""
    val = prepare.load(str(toys / "set"), 16).val
    return torch.tensor(np.stack([val.window(i, 16) for i in np.linspace(0, len(val) - 16, 4).astype(int)]))


def test_fig_entropy_formula():
    """Catches a wrong exponent, sign or normalisation of the entropy, and a lost square of the singular values."""
    torch.manual_seed(0)
    for shape in ((7, 4), (4, 7)):
        x = torch.randn(*shape, dtype=torch.float64)
        e = np.abs(np.linalg.eigvalsh(x.numpy() @ x.numpy().T))
        expect = 2 * math.log(sum(math.sqrt(v / e.sum()) for v in e))
        assert abs(analyze.matrix_entropy(x) - expect) < 1e-6
    assert abs(analyze.matrix_entropy(3 * torch.eye(5, 9, dtype=torch.float64)) - math.log(5)) < 1e-6    # orthogonal
    assert analyze.matrix_entropy(torch.ones(6, 3).double()) < 1e-6 and analyze.matrix_entropy(torch.zeros(6, 3)) == 0


def test_fig_entropy_by_layer(fig_toys, fig_drawn):
    """Catches figures 5, 11 that standardise within a window, mix up heads and tokens, or shift the blocks."""
    model, trace = fig_model(fig_toys, "kv"), {}
    with torch.no_grad():
        model(fig_windows(fig_toys), trace=trace)
    for name, xs in (("fig05_entropy_values", trace["values"]), ("fig11_entropy_hidden", trace["hidden"])):
        found = fig_numbers(fig_drawn, name)
        assert set(found) == set(FIG_RUNS) and len(found["kv"]["y"]) == len(xs)
        for r, x in enumerate(xs):
            x = (x.transpose(1, 2).flatten(2) if x.ndim == 4 else x).double()
            x = ((x - x.mean((0, 1))) / x.std((0, 1), correction=0)).numpy()
            e = [np.abs(np.linalg.eigvalsh(window @ window.T)) for window in x]
            e = [2 * math.log(np.sqrt(v / v.sum()).sum()) for v in e]
            assert abs(found["kv"]["y"][r] - np.mean(e)) < 1e-4 and abs(found["kv"]["std"][r] - np.std(e)) < 1e-4


def test_fig_dynamic_prior(fig_toys, fig_drawn):
    """Catches a prior that is not the mean over all tokens, a spread that is not its std, a route out of place."""
    model, mean = fig_model(fig_toys, "dynamic"), fig_weights(fig_drawn, "dynamic_mean")
    spread, routes = fig_weights(fig_drawn, "dynamic_spread"), fig_numbers(fig_drawn, "table2_circuits")
    table = {(x["block"], x["head"], x["representation"]): x["share"] for x in routes}
    for r in (1, 2):
        memory, a, trace = model.blocks[r].attn.memory, [], {}
        with torch.no_grad():
            model(fig_windows(fig_toys), trace=trace)
        for x in trace["hidden"][r].flatten(0, 1).tolist():                     # token by token
            n = [v / math.sqrt(sum(w * w for w in x) / 8 + 1e-6) * g for v, g in zip(x, memory.gain.tolist())]
            z = [math.exp(sum(w * v for w, v in zip(row, n))) for row in memory.W.tolist()]
            a.append([[z[h * (r + 1) + m] / sum(z[h * (r + 1):(h + 1) * (r + 1)]) for m in range(r + 1)] for h in range(2)])
        a = np.array(a)
        assert np.allclose(mean[r], a.mean(0), atol=1e-5) and np.allclose(spread[r], a.std(0), atol=1e-5)
        for h, m in np.ndindex(2, r + 1):
            assert abs(table[r, h, m] - (a[:, h].argmax(-1) == m).mean()) < 0.02


def test_fig_circuits(fig_toys, fig_drawn):
    """Catches table 2 with normalised embeddings, without the router's gain, or with entries of another route."""
    model, encoding = fig_model(fig_toys, "dynamic"), prepare.get_tokenizer("bytes")
    routes = fig_numbers(fig_drawn, "table2_circuits")
    for route in routes:
        memory = model.blocks[route["block"]].attn.memory
        w = memory.W[route["head"] * (route["block"] + 1) + route["representation"]] * memory.gain
        scores = [sum((w * e).tolist()) for e in model.embed]
        best = sorted(range(257), key=lambda i: -scores[i])[:8]
        words = [encoding.decode_single_token_bytes(i).decode("utf-8", "replace") for i in best]
        assert route["tokens"] == words and route["run"] == "dynamic"
    assert len(routes) == 10 and [x["share"] for x in routes] == sorted((x["share"] for x in routes), reverse=True)
    assert len((fig_drawn / "table2_circuits.txt").read_text().splitlines()) >= 11


def test_fig_retrieval_by_loops(fig_toys, fig_drawn):
    """Catches a sum over the wrong blocks or heads in figures 2, 3, 4, 9, 10, and weights that don't sum to 1."""
    for name in ("static", "kv", "pruned", "dynamic"):
        a = fig_weights(fig_drawn, f"{name}_mean")
        if name == "kv":
            R = fig_model(fig_toys, "kv").blocks[2].attn.memory.R.tolist()
            signed = fig_numbers(fig_drawn, "fig13_weights_kv_signed")[-1]
            expect = [[(abs(R[h][2 * m]) + abs(R[h][2 * m + 1])) / sum(map(abs, R[h])) for m in range(3)] for h in range(2)]
            assert np.allclose(a[2], expect, atol=1e-6) and np.allclose(signed, R)
        assert all(abs(sum(row) - 1) < 1e-6 for w in a[1:] for row in w)
        own = [[a[r][h][r] for r in (1, 2)] for h in range(2)]
        assert np.allclose(fig_numbers(fig_drawn, "fig03_self_retrieval")[name], own)
        assert np.allclose(fig_numbers(fig_drawn, "fig10_mean_self_retrieval")[name]["y"], np.mean(own, 0))
        expect = [sum(m * a[r][h][m] for h in range(2) for m in range(r + 1)) / 2 for r in (1, 2)]
        assert np.allclose(fig_numbers(fig_drawn, "fig04_expected")[name]["y"], expect)
        later = [sum(a[r][h][m] for r in range(m + 1, 3) for h in range(2)) / (2 * (2 - m)) for m in range(2)]
        assert np.allclose(fig_numbers(fig_drawn, "fig02_retrieval")[name]["y"], later)
    deep = fig_numbers(fig_drawn, "fig09_deep_pruned")
    assert deep["later blocks"]["y"] == fig_numbers(fig_drawn, "fig02_retrieval")["pruned"]["y"]
    assert deep["block m"]["y"] == fig_numbers(fig_drawn, "fig10_mean_self_retrieval")["pruned"]["y"]


def test_fig_planted(fig_drawn):
    """Catches any retrieval figure that does not show a last block reading representation 0 alone."""
    a = fig_weights(fig_drawn, "planted_mean")
    assert np.allclose(a[-1], [[1, 0, 0]] * 2)
    assert abs(fig_numbers(fig_drawn, "fig04_expected")["planted"]["y"][-1]) < 1e-9
    assert max(row[-1] for row in fig_numbers(fig_drawn, "fig03_self_retrieval")["planted"]) < 1e-9
    assert fig_numbers(fig_drawn, "fig10_mean_self_retrieval")["planted"]["y"][-1] < 1e-9
    assert np.allclose(fig_numbers(fig_drawn, "fig02_retrieval")["planted"]["y"],
                       [(1 + np.mean([row[0] for row in a[1]])) / 2, 0])


def test_fig_pruning(fig_toys, fig_drawn):
    """Catches weights that are counted wrongly, and figures 9, 14 drawn for shallow unpruned runs."""
    zeros, weights = 0, 0
    for r in (1, 2):
        for row in fig_model(fig_toys, "pruned").blocks[r].attn.memory.R.softmax(-1).tolist():
            kept, total = 0, 0.0
            for p in sorted(row, reverse=True):
                if total < 0.6:
                    total, kept = total + p, kept + 1
            zeros, weights = zeros + len(row) - kept, weights + len(row)
    table = {row["run"]: row for row in fig_numbers(fig_drawn, "table5_pruning")}
    assert (table["pruned"]["weights"], table["pruned"]["pruned"]) == (weights, zeros) and zeros > 0
    assert set(table) == {"static", "planted", "pruned"} and table["static"]["pruned"] == 0
    assert sum(x == 0 for w in fig_numbers(fig_drawn, "fig14_deep_weights_pruned") for row in w for x in row) == zeros
    assert not [*fig_drawn.glob("fig09_deep_static*"), *fig_drawn.glob("fig14_deep_weights_static*")]


def test_fig_classifier():
    """Catches folds scored on their training half, and a wrong number of folds."""
    rng = np.random.default_rng(0)
    y = np.repeat(range(4), 40)
    x = rng.normal(size=(160, 6)) + 8 * np.eye(4, 6)[y]
    assert analyze.accuracy(x, y).mean() > 0.98 and len(analyze.accuracy(x, y)) == 5
    assert abs(analyze.accuracy(rng.normal(size=(160, 100)), rng.permutation(y)).mean() - 0.25) < 0.12


def test_fig_samples(fig_toys, fig_drawn):
    """Catches labels that slip against samples, samples of other positions than the tokens', unequal classes."""
    args = analyze.prepare.Parser().parse_args([])
    args.tokens, args.seed, args.device = None, 1, "cpu"
    run = analyze.Run(fig_toys / "static", args, [])
    run.T = 16
    y, layers = run.samples
    embed = fig_model(fig_toys, "static").embed.detach().double().numpy()[[ord("aeiou"[c]) for c in y]]
    assert len(layers["values"]) == 3 and len(layers["hidden states"]) == 4 and np.bincount(y).tolist() == [8] * 5
    assert np.allclose(layers["hidden states"][0], (embed - embed.mean(0)) / embed.std(0, ddof=1), atol=1e-5)
    assert analyze.accuracy(layers["hidden states"][0], y).mean() > 0.99                 # the embedding is the token


def test_fig_loss(fig_toys, fig_drawn):
    """Catches seeds not averaged, or runs of other settings that are; a wrong unit; loss and tokens out of step."""
    found, flops = fig_numbers(fig_drawn, "fig01_loss_tokens"), fig_numbers(fig_drawn, "fig01_loss_flops")
    names = {"llama", "static, mean of 2", "dynamic", "kv", "pruned"}
    assert set(found) == set(flops) == names | {f"{name}, training" for name in names}
    both = found["static, mean of 2"]
    assert np.allclose(both["x"], [128e-6, 256e-6]) and np.allclose(both["y"], [2.25, 1.25])
    assert np.allclose(both["std"], math.sqrt(0.125)) and np.allclose(found["llama"]["std"], 0)
    a_token = 6 * lime.forward_flops(fig_model(fig_toys, "llama").cfg, 16) // 16
    assert np.allclose(flops["llama"]["x"], [128e-12 * a_token, 256e-12 * a_token])


def test_fig_same_again(fig_toys, fig_drawn):
    """Catches a draw that --seed does not fix, and --only drawing more or less than was asked."""
    argv = [str(fig_toys / "kv"), "--device=cpu", "--only=fig06,fig05", "--tokens=a,e"]
    for folder in ("once", "twice"):
        analyze.main([*argv, f"--figures={fig_toys / folder}"])
    files = sorted(path.name for path in (fig_toys / "once").iterdir())
    assert files == [f"{stem}.{kind}" for stem in ("fig05_entropy_values", "fig06_tsne_values")
                     for kind in ("json", "png")]
    assert all((fig_toys / "once" / f).read_bytes() == (fig_toys / "twice" / f).read_bytes() for f in files)


def test_fig_one_line(fig_toys, capsys, monkeypatch):
    """Catches tracebacks for missing, foreign or mixed runs and wrong flags, and skips without a reason."""
    for argv, words in ((["nowhere"], "nowhere"), (["static", "foreign"], "different data"), (["static", "static"], "two runs"),
                        (["foreign", "--only=entropy"], "not the data"), (["static", "--only=figs"], "figs"),
                        (["static", "--only=tokens", "--tokens=a,bc"], "bc")):
        argv = [a if a.startswith("--") else str(fig_toys / a) for a in argv]
        with pytest.raises(prepare.UserError, match=words):
            analyze.main([*argv, f"--figures={fig_toys / 'none'}", "--device=cpu"])
    capsys.readouterr()
    for only, words in (("retrieval", "fig02: skipped for llama"), ("circuits", "table2: skipped"), ("pruning", "table5"),
                        ("deep", "fig09"), ("fig08", "fig08: skipped"), ("fig06", "fig06: skipped")):
        analyze.main([str(fig_toys / "llama"), f"--only={only}", "--tokens=@,a", f"--figures={fig_toys / 'empty'}"])
        assert words in capsys.readouterr().err and not [*(fig_toys / "empty").iterdir()]
    monkeypatch.setitem(sys.modules, "sklearn", None)                           # as where it is not installed
    spec = importlib.util.spec_from_file_location("analyze_again", analyze.__file__)
    with pytest.raises(SystemExit, match="^analyze.py: .*pip install matplotlib scikit-learn$"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
