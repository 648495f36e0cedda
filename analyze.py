"""
See what runs have learned: the paper's figures and tables (arXiv 2502.09245), from checkpoints of your own.

    python analyze.py out/llama out/static out/dynamic          all that applies, into figures/
    python analyze.py out/deep --only=deep,pruning,fig02          some groups, or single figures
    python analyze.py out/* --tokens=" is, are, was, were"      the tokens that figures 6, 7, 12, 15 compare

Beside each NAME.png or .txt lies NAME.json with its numbers. Needs: pip install matplotlib scikit-learn
Letters as in lime.py; "representation m" is the stream that entered block m, 0 the embedding.
"""
import json
import sys
import time
from functools import cached_property, partialmethod
from pathlib import Path

import numpy as np
import torch

import bench
from data import prepare
from data.prepare import UserError
from runs import load_model, newest_run, pick_device, read_log

try:
    import matplotlib
    import matplotlib.pyplot as plt
    from sklearn import linear_model, manifold, model_selection
except ImportError as e:
    raise SystemExit(f"analyze.py: {e}; install what it needs: pip install matplotlib scikit-learn") from None

WINDOWS, OCCURRENCES = 16, 60    # for entropy and dynamic routers; of each token to compare, the most used
TOKENS = dict(gpt2=" is, are, was, were", bytes="a,e,i,o,u")
M = "representation m (0: embedding)"
COLOUR = dict(llama="#4D4D4D", static="#0072B2", dynamic="#D55E00", kv="#009E73", hc="#CC79A7")  # safe for
TOKEN_COLOUR = "#332288 #44AA99 #DDAA33 #AA4499 #88CCEE #661100 #117733 #999999".split()   # the colour-blind
plt.rcParams.update({"backend": "Agg", "figure.constrained_layout.use": True, "figure.dpi": 110,
                     "axes.grid": True, "grid.color": "0.9", "axes.titlesize": 10, "image.aspect": "auto"})

def say(text, began=time.perf_counter()):
    print(f"[{time.perf_counter() - began:5.1f} s] {text}", file=sys.stderr, flush=True)

def matrix_entropy(x, alpha=0.5):
    """Renyi entropy in nats of x (T, features), standardised already: log(sum e^alpha) / (1 - alpha), where e
    are the eigenvalues of x x^T over its trace. x^T x has the same ones but for zeros."""
    e = torch.linalg.eigvalsh(x.T @ x).clamp(min=0)
    return (torch.log((e / e.sum()).pow(alpha).sum()) / (1 - alpha)).item() if e.sum() > 0 else 0.0

def accuracy(x, y):
    """Accuracies (5,) over stratified folds of a linear classifier of x (N, features) into classes y (N,)."""
    return model_selection.cross_val_score(linear_model.LogisticRegression(max_iter=1000), x, y, cv=5)

class Run:
    """A checkpoint and its log. All runs see the same windows, from the validation text of the first."""
    def __init__(self, folder, args, others):
        self.device = pick_device(args.device)[0]
        ckpt, self.model = load_model(Path(folder, "ckpt.pt"), self.device)
        self.args, self.label, self.first = args, Path(folder).resolve().name, [*others, self][0]
        self.data, self.settings, self.tokenizer = ckpt["data"], ckpt["settings"], ckpt["tokenizer"]
        if self.data != self.first.data:
            raise UserError(f"{self.label} and {self.first.label} have different data: analyse them apart")
        if self.label in [run.label for run in others]:
            raise UserError(f"two runs are called {self.label}: leave one out, or rename a folder")
        self.model.requires_grad_(False)
        self.cfg, self.variant, self.L = self.model.cfg, self.model.cfg.variant, self.model.cfg.n_layer
        self.deep = self.L >= 32 or self.cfg.route_top_p < 1
        self.style = ["-", "--", ":", "-."][sum(run.variant == self.variant for run in others) % 4]
        self.routed = self.variant in ("static", "dynamic", "kv") and self.L > 1
        self.extent = -0.5, self.L - 0.5, 0.5, self.L - 0.5      # of a picture, representations by blocks
        self.log = dict(train={}, eval={})                       # losses by number of tokens
        for line in read_log(Path(folder, "log.jsonl")):
            if line.get("kind") in self.log and all(type(line.get(k)) in (int, float)
                                                    for k in ("tokens", "loss")):
                self.log[line["kind"]][line["tokens"]] = line["loss"]

    @cached_property
    def val(self):
        data = prepare.load(self.settings["dataset"], self.T, vocab_size=self.cfg.vocab_size)
        if data.fingerprint != self.data:
            raise UserError(f"{self.settings['dataset']} is not the data of {self.label}: prepare that")
        return data.val

    @cached_property
    def tokens(self):
        """Names; start of window, position, which of all N occurrences; None: too few for five folds."""
        kind, T, text = self.tokenizer, self.T, self.args.tokens or TOKENS[self.tokenizer]
        names, encoding = text.split(","), prepare.get_tokenizer(kind)
        ids = [encoding.encode_ordinary(name) for name in names]
        if not 2 <= len(set(names)) == len(names) <= 8 or any(len(i) != 1 for i in ids):
            raise UserError(f"--tokens={text}: expected 2 to 8 different ones, each a single token of {kind}")
        starts = np.random.default_rng(self.args.seed).permutation(len(self.val) // T)[:2000] * T
        windows = np.stack([self.val.window(start, T) for start in starts])
        found = [np.argwhere(windows == i) for (i,) in ids]
        n = min(OCCURRENCES, *map(len, found))
        say(f"found {dict(zip(names, map(len, found)))}, {n} of each are used" + ", which is few" * (n < 30))
        window, position = np.concatenate([some[:n] for some in found]).T
        return (names, starts[window], position, np.arange(len(names)).repeat(n)) if n >= 5 else None

    def traces(self, starts=None):
        """Of one window after another, to bound memory: the layers, values (T, Hkv hd) and then hidden states
        (T, D), in one list, and the routers' weights. Default: windows spread evenly."""
        val, T = self.first.val, self.first.T
        for start in np.linspace(0, len(val) - T, WINDOWS).astype(int) if starts is None else starts:
            trace = {}
            self.model.hidden(torch.from_numpy(val.window(start, T))[None].to(self.device), trace=trace)
            values = [v.transpose(1, 2).flatten(2) for v in trace["values"]]
            yield [x[0].cpu().double() for x in values + trace["hidden"]], [
                w.cpu().double() for w in trace["weights"][1:] if w is not None]

    def split(self, layers):
        return {"values": layers[:self.L], "hidden states": layers[self.L:]}

    @cached_property
    def router(self):
        """What blocks r = 1..L-1 read. mean: weights (L-1, H, L), rows sum to 1, nan past r: static's table;
        of kv |R|, all heads of a representation, over the row's sum, with signed: R; of dynamic the mean over
        tokens, with spread: std over them, and first: share of them for which a route is the head's first.
        own (H, L-1): a[h, r]. Means: later, weight of m in later blocks; expected, sum_m m a[h, m]."""
        def table(blocks):                                       # rows as long as the last block's
            full = torch.full((len(blocks), *blocks[-1].shape), torch.nan, dtype=torch.float64)
            for row, x in zip(full, blocks):
                row[..., :x.shape[-1]] = x
            return full.numpy()
        if self.variant == "dynamic":
            sums = 0
            for _, weights in self.traces():                                    # (T, H, r+1) each
                some = [torch.stack((w, w * w, w == w.amax(-1, keepdim=True))).mean(1) for w in weights]
                sums = sums + table(some) / WINDOWS
            a, square, first = sums.swapaxes(0, 1)
            more = dict(first=first, spread=np.sqrt(np.maximum(square - a * a, 0)))
        else:
            R = [block.attn.memory.weights(None) for block in self.model.blocks[1:]]
            a = [w.abs().unflatten(-1, (r, -1)).sum(-1) for r, w in enumerate(R, 2)]
            a, more = table([w / w.sum(-1, keepdim=True) for w in a]), dict(signed=table(R))
        return dict(more, mean=a, own=np.stack([w[:, r] for r, w in enumerate(a, 1)], 1),
                    later=np.array([a[m:, :, m].mean() for m in range(self.L - 1)]),
                    expected=np.nansum(a * np.arange(self.L), -1).mean(1))

    @cached_property
    def entropy(self):
        """Matrix entropies, layers x windows. A first pass finds mean and std of each feature."""
        sums = [0] * (2 * self.L + 1)
        for layers, _ in self.traces():
            sums = [old + torch.stack((x, x * x)).mean(1) / WINDOWS for old, x in zip(sums, layers)]
        std = [(square - mean * mean).clamp(min=1e-24).sqrt() for mean, square in sums]
        e = [[matrix_entropy((x - m[0]) / d) for x, m, d in zip(xs, sums, std)] for xs, _ in self.traces()]
        return self.split(np.array(e).T)

    @cached_property
    def samples(self):
        """Of the tokens to compare: classes; values, hidden states by layer (N, features), standardised."""
        _, starts, positions, classes = self.first.tokens
        windows, rows = np.unique(starts), []
        for start, (layers, _) in zip(windows, self.traces(windows)):
            rows.append([x[positions[starts == start]] for x in layers])
        xs = [torch.cat(x) for x in zip(*rows)]
        xs = [((x - x.mean(0)) / x.std(0).clamp(min=1e-12)).numpy() for x in xs]
        return classes[np.argsort(starts, kind="stable")], self.split(xs)

class Figures:
    """The paper's figures and tables, a method each, of self.runs."""
    def save(self, picture, numbers, suffix=""):
        """A figure as .png, or without one a table as .txt, and the numbers beside it."""
        path = f"{self.folder}/{self.name}{suffix}"
        if picture:
            picture.savefig(f"{path}.png", metadata=dict(Software=None))        # the same bytes every time
            plt.close(picture)
        else:
            rows = [numbers[0].keys(), *(row.values() for row in numbers)]
            rows = ["  ".join(f"{x!s:14}" for x in row).rstrip() for row in rows]
            Path(f"{path}.txt").write_text("\n".join(rows) + "\n", "utf-8")
        text = json.dumps(numbers, default=lambda x: np.where(np.isfinite(x), x, None).tolist())
        Path(f"{path}.json").write_text(text + "\n", "utf-8")
        say(path)

    def curves(self, curve, first=0):
        """Lines for line_plot, from x = first on: curve(run), or if that is (x, n), its mean and std."""
        for run in self.runs:
            y = curve(run)
            y, std = (y, None) if y.ndim == 1 else (y.mean(1), y.std(1))
            yield run.label, run, run.style, first + np.arange(len(y)), y, std

    def line_plot(self, title, lines, xlabel, ylabel, suffix=""):
        """Lines (label, run, style, x, y, band or None), those of training thin, others named at the end."""
        fig, ax = plt.subplots(figsize=(8, 4.2))
        fig.suptitle(title, x=0.01, ha="left")
        lines = sorted(lines, key=lambda line: -line[4][-1])
        for label, run, style, x, y, band in lines:
            marker, width = ("", 0.7) if label.endswith(", training") else ("o", 1.6)
            ax.plot(x, y, style, color=COLOUR[run.variant], marker=marker, ms=3, lw=width)
            if band is not None:
                ax.fill_between(x, y - band, y + band, color=COLOUR[run.variant], alpha=0.1, lw=0)
        ax.set(xlabel=xlabel, ylabel=ylabel)
        ax.spines[["top", "right"]].set_visible(False)
        fig.canvas.draw()                                        # places the axes, which text must know
        inside, gap, high = ax.transData + ax.transAxes.inverted(), 20 / ax.bbox.height, 2
        named = [line for line in lines if not line[0].endswith(", training")]
        for below, (label, run, _, x, y, _) in zip(range(len(named))[::-1], named):        # moved apart
            high = max(min(inside.transform((x[-1], y[-1]))[1], high - gap), below * gap)
            ax.text(1.01, high, label, color=COLOUR[run.variant], va="center", transform=ax.transAxes)
        self.save(fig, {label: dict(x=x, y=y, std=std) for label, _, _, x, y, std in lines}, suffix)

    def heat_maps(self, title, panels, columns, height, labels, numbers, suffix=""):
        """Panels (title, image, extent), first row at the bottom; labels of x, y and colours. Weights have a
        square-root scale of colours, as most are small, with 0 in grey and nan in white."""
        fig, axes = plt.subplots(len(panels) // columns, columns, figsize=(8, height), squeeze=False,
                                 sharex=columns > 1, sharey=columns > 1)
        high = max(np.nanmax(np.abs(image)) for _, image, _ in panels)
        signed = min(np.nanmin(image) for _, image, _ in panels) < 0
        norm = matplotlib.colors.PowerNorm(1 if signed else 0.5, -high if signed else 1e-9, high)
        colours = matplotlib.colormaps["RdBu_r" if signed else "YlGnBu"].with_extremes(bad="w", under="0.77")
        for ax, (name, image, extent) in zip(axes.flat, panels):
            shown = ax.imshow(image, colours, norm, interpolation="nearest", origin="lower", extent=extent)
            ax.set_title(name, loc="left")
            ax.grid(False)
            ax.locator_params(integer=True, nbins=6)
        fig.suptitle(title, x=0.01, ha="left")
        fig.supxlabel(labels[0], size=10)
        fig.supylabel(labels[1], size=10)
        fig.colorbar(shown, ax=axes, label=labels[2])
        self.save(fig, numbers, suffix)

    def alike(self, runs, but=""):
        """Lists of runs that share all settings, but for the seed, what does not matter, and `but`."""
        free, groups = ("seed", "out_dir", "resume", "device", "log_interval", "dataset", but), {}
        for run in runs:
            same = {k: v for k, v in {**run.settings, **vars(run.cfg)}.items() if k not in free}
            groups.setdefault(str(same), []).append(run)
        return groups.values()

    def loss(self, runs, kind):
        """Numbers of tokens, and mean and std over runs (of one 0) of the loss there; kind: train, eval."""
        x = sorted(set.intersection(*(set(run.log[kind]) for run in runs)))
        y = np.array([[run.log[kind][tokens] for tokens in x] for run in runs])
        return np.array(x), y.mean(0), y.std(0, ddof=int(len(y) > 1))

    def fig01_loss(self):
        for suffix, xlabel in ("_tokens", "training tokens, millions"), ("_flops", "training FLOPs, 10¹²"):
            lines = []
            for run, *more in self.alike(self.runs):
                T, label = run.cfg.block_size, run.label + f", mean of {len(more) + 1}" * bool(more)
                unit = 1e6 if suffix == "_tokens" else 1e12 / (6 * bench.forward_flops(run.cfg, T) // T)
                for kind, name in ("train", f"{label}, training"), ("eval", label):
                    x, y, std = self.loss([run, *more], kind)
                    if not len(x):
                        say(f"fig01: no {kind} loss of {run.label} where all its runs have one")
                        continue
                    late = x >= x[-1] / 4                        # the first steps would flatten the rest
                    lines.append((name, run, run.style, x[late] / unit, y[late], std[late]))
            self.line_plot("Validation and (thin) training loss", lines, xlabel, "nats per token", suffix)

    def fig02_retrieval(self):
        self.line_plot("How much later blocks read each representation", self.curves(
            lambda run: run.router["later"]), M, "weight, mean over heads and later blocks")

    def fig03_self_retrieval(self):
        own = {run.label: run.router["own"] for run in self.runs}
        panels = [(label, a, (0.5, a.shape[1] + 0.5, -0.5, len(a) - 0.5)) for label, a in own.items()]
        self.heat_maps("How much each head reads its block's own stream", panels, 1, 1 + 1.4 * len(own),
                       ("block", "head", "weight of the own stream"), own)

    def fig04_expected(self):
        self.line_plot("Which representation a block reads, on average", self.curves(
            lambda run: run.router["expected"], 1), "block r (its own stream: r)", "expected representation")

    def fig05_entropy_values(self, which="values", xlabel="block"):
        self.line_plot(f"Matrix entropy of {which} (band: std over windows)", self.curves(
            lambda run: run.entropy[which]), xlabel, "entropy, nats")

    def fig06_tsne_values(self, which="values", layer="block"):
        """t-SNE of values, a row a run, a panel a layer; not of layer 0, which holds the token alone."""
        runs, numbers, names = self.runs, {}, self.runs[0].first.tokens[0]
        fig, axes = plt.subplots(len(runs), 4, figsize=(8, 1 + 1.75 * len(runs)), squeeze=False,
                                 subplot_kw=dict(xticks=[], yticks=[]))
        for run, row in zip(runs, axes):
            y, xs, numbers[run.label] = run.samples[0], run.samples[1][which], {}
            for ax, i in zip(row, np.linspace(min(1, len(xs) - 1), len(xs) - 1, 4).astype(int).tolist()):
                tsne = manifold.TSNE(perplexity=min(30, len(y) / 4), random_state=run.args.seed)
                place = numbers[run.label][i] = tsne.fit_transform(xs[i])
                for c, name in enumerate(names):
                    ax.scatter(*place[y == c].T, 9, TOKEN_COLOUR[c], marker="os^Dv*PX"[c], label=repr(name))
                ax.set_title(f"{layer} {i}", size=9)
            row[0].set_ylabel(run.label, color=COLOUR[run.variant])
        fig.suptitle(f"t-SNE of the {which} of similar tokens (no units)", x=0.01, ha="left")
        fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=8, markerscale=2)
        self.save(fig, dict(numbers, tokens=[names[c] for c in y]))

    def fig07_accuracy_values(self, which="values", xlabel="block"):
        self.line_plot(f"Similar tokens told apart by their {which} (band: std over 5 folds)", self.curves(
            lambda run: np.array([accuracy(x, run.samples[0]) for x in run.samples[1][which]])), xlabel,
            f"accuracy (chance: {1 / len(self.runs[0].first.tokens[0]):.2f})")

    def fig08_depth(self):
        lines = []
        for some in self.alike(self.runs, "n_layer"):
            last = [(same[0].L, *(x[-1] for x in self.loss(same, "eval")[1:])) for same in self.alike(some)]
            if len(last) > 1:
                lines.append((some[0].variant, some[0], some[0].style, *np.array(sorted(last)).T))
        if not lines:
            return say("fig08: skipped, as no runs differ in n_layer alone")
        self.line_plot("Validation loss by depth", lines, "blocks", "last validation loss, nats per token")

    def fig09_deep(self):
        for run in self.runs:
            later, own, m = run.router["later"], run.router["own"].mean(0), np.arange(run.L - 1)
            lines = [("later blocks", run, "-", m, later, None), ("block m", run, "--", m + 1, own, None)]
            self.line_plot(f"{run.label}: who reads representation m", lines, M, "weight", f"_{run.label}")

    def fig10_mean_self_retrieval(self):
        self.line_plot("How much a block reads its own stream", self.curves(
            lambda run: run.router["own"].mean(0), 1), "block", "weight of the own stream, mean over heads")

    fig11_entropy_hidden = partialmethod(fig05_entropy_values, "hidden states", M)
    fig12_accuracy_hidden = partialmethod(fig07_accuracy_values, "hidden states", M)

    def fig13_weights(self):
        labels = dict(mean="weight", spread="std over tokens", signed="R, head by head")
        for run in self.runs:
            H, columns = len(run.router["own"]), np.gcd(len(run.router["own"]), 4)
            for key in dict(dynamic=("mean", "spread"), kv=("mean", "signed"), static=["mean"])[run.variant]:
                panels = [(f"head {h}", run.router[key][:, h], run.extent) for h in range(H)]
                self.heat_maps(f"{run.label}: what each head reads", panels, columns, 0.6 + 2.3 * H / columns,
                               (M, "block", labels[key]), run.router[key], f"_{run.label}_{key}")

    def fig14_deep_weights(self):
        for run in self.runs:                                    # all heads of a block one above the other
            a = run.router["mean"]
            panels = [(f"{run.label}: all weights (grey: pruned)", a.reshape(-1, run.L), run.extent)]
            self.heat_maps("", panels, 1, 8, (M, "block, all its heads", "weight"), a, f"_{run.label}")

    fig15_tsne_hidden = partialmethod(fig06_tsne_values, "hidden states", "stream")

    def table2_circuits(self):
        """Of each route (block, representation, head) the entries of the vocabulary whose embedding, not
        normalised, gives it the largest logits, and the share of tokens for which it is the strongest."""
        rows = []
        for run in self.runs:
            encoding = prepare.get_tokenizer(run.tokenizer)
            for r, block in enumerate(run.model.blocks[1:], 1):
                w = (block.attn.memory.W * block.attn.memory.gain).unflatten(0, (-1, r + 1))     # (H, r+1, D)
                best = (w @ run.model.embed[:encoding.n_vocab].T).topk(8).indices
                for h, m in np.ndindex(w.shape[:2]):
                    words = map(encoding.decode_single_token_bytes, best[h, m].tolist())
                    rows.append(dict(run=run.label, block=r, representation=m, head=h,
                                     share=round(run.router["first"][r - 1, h, m], 4),
                                     tokens=[word.decode(errors="replace") for word in words]))
        self.save(None, sorted(rows, key=lambda row: -row["share"]))

    def table5_pruning(self):
        """Weights of static routers, H (L (L + 1) / 2 - 1), and how many of them route_top_p has set to 0.
        The paper, H = 8, counts 16 L (L - 1) / 2; of 32, 64, 128 blocks it pruned 23%, 21%, 19%."""
        rows = []
        for run in self.runs:
            n, zero = int(np.isfinite(run.router["mean"]).sum()), int((run.router["mean"] == 0).sum())
            rows.append(dict(run=run.label, blocks=run.L, top_p=run.cfg.route_top_p, weights=n, pruned=zero,
                             share=f"{zero / n:.1%}"))
        self.save(None, rows)

GROUPS = dict(  # figures, what they need, and whether a run has that
    loss=("fig01 fig08", "both kinds of losses in the log", lambda run: run.log["train"] and run.log["eval"]),
    retrieval=("fig02 fig03 fig04 fig10 fig13", "a router", lambda run: run.routed),
    deep=("fig09 fig14", "a router with 32 blocks or top-p", lambda run: run.routed and run.deep),
    entropy=("fig05 fig11", "", lambda run: True),
    tokens=("fig06 fig07 fig12 fig15", "5 of each of the --tokens", lambda run: run.first.tokens),
    circuits=("table2", "a dynamic router", lambda run: run.routed and run.variant == "dynamic"),
    pruning=("table5", "a static router", lambda run: run.routed and run.variant == "static"))

def seed(text):
    return int(text) % 2 ** 32

def main(argv):
    parser, runs, draw = prepare.Parser(description=__doc__), [], Figures()
    parser.add_argument("runs", nargs="*", help="folders of runs; default: the newest under out/")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups or figures [%(default)s]")
    parser.add_argument("--tokens", help='2 to 8 to compare [" is, are, was, were", with bytes the vowels]')
    parser.add_argument("--figures", default="figures", help="folder to write to [%(default)s]")
    parser.add_argument("--seed", type=seed, default=1, help="[%(default)s]")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps; auto: the best there is")
    args = parser.parse_args(argv)
    only, names = args.only.split(","), " ".join(names for names, *_ in GROUPS.values()).split()
    if not {*names, *GROUPS}.issuperset(only):
        raise UserError(f"--only={args.only}: expected some of {', '.join([*GROUPS, *names])}")
    for folder in args.runs or [newest_run()]:
        runs.append(Run(folder, args, runs))
    runs[0].T, draw.folder = min(run.cfg.block_size for run in runs), args.figures
    try:
        Path(draw.folder).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--figures={draw.folder} can't be made: {e.strerror}; take another folder") from None
    for group, (names, needs, fits) in GROUPS.items():
        for name in [name for name in names.split() if name in only or group in only]:
            draw.runs, rest = [run for run in runs if fits(run)], [run.label for run in runs if not fits(run)]
            if rest:
                say(f"{name}: skipped for {', '.join(rest)}, as it needs {needs}")
            if draw.runs:
                draw.name = next(method for method in dir(draw) if method.startswith(name))
                getattr(draw, draw.name)()

if __name__ == "__main__":
    prepare.run(lambda: main(sys.argv[1:]))
