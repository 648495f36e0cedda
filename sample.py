"""
Continue a text with a trained model: the newest run under out/, or another.

    python sample.py --start="The moon" --num_samples=3
    python sample.py --out_dir=out/dynamic --start=FILE:prompt.txt --temperature=0
"""
import codecs
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from data import prepare
from data.prepare import UserError
from runs import load_model, newest_run, pick_device

@dataclass
class Settings:
    out_dir: str = ""          # the run's folder, or a checkpoint in it; default: the newest under out/
    start: str = ""            # text to go on from, or FILE:path; default: the beginning of a document
    num_samples: int = 1       # how many texts
    max_new_tokens: int = 300  # the most tokens of each; it ends earlier where the model ends the document
    temperature: float = 0.8   # 1: as trained; lower: more likely tokens; 0: always the likeliest
    top_k: int = 200           # draw among so many of the likeliest tokens; 0: off
    top_p: float = 1.0         # draw among the likeliest that have this share together, above 0; 1: off
    seed: int = 1              # of the draws
    device: str = "auto"       # cpu, cuda, cuda:1, mps; auto: the best there is

def check(s):
    for flag, low, high in (("num_samples", 1, 10 ** 9), ("max_new_tokens", 1, 10 ** 9),
                            ("temperature", 0, 1000), ("top_k", 0, 10 ** 9), ("top_p", 1e-9, 1),
                            ("seed", 0, 2 ** 63 - 1)):
        if not low <= getattr(s, flag) <= high:
            raise UserError(f"--{flag}={getattr(s, flag)}, expected {low:g} to {high:g}")

def read_start(start):
    """The prompt; of a file, its text as UTF-8."""
    if not start.startswith("FILE:"):
        if any("\ud800" <= c <= "\udfff" for c in start):              # bytes that the shell's text had
            raise UserError("--start is not a UTF-8 text")
        return start
    try:
        return Path(start[5:]).read_bytes().decode("utf-8")             # line ends stay, as in training
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not a UTF-8 text"
        raise UserError(f"--start={start}: {reason}") from None

def main(argv):
    parser = prepare.Parser(description=__doc__)
    parser.add_fields(Settings)
    s = Settings(**vars(parser.parse_args(argv)))
    check(s)
    device, _ = pick_device(s.device)
    text, path = read_start(s.start), Path(s.out_dir or newest_run())
    if path.suffix != ".pt" or path.is_dir():
        path = path / ("best.pt" if (path / "best.pt").exists() else "ckpt.pt")
    run, model = load_model(path, device)
    encoding = prepare.get_tokenizer(run["tokenizer"])
    if encoding.n_vocab > model.cfg.vocab_size:
        raise UserError(f"{path}: {model.cfg.vocab_size} ids, fewer than tokenizer {run['tokenizer']} has")

    prompt = [encoding.eot_token]                                       # every document of the data begins so
    for piece in prepare.pieces([text]):                                # long runs of a letter are slow
        prompt += encoding.encode_ordinary(piece)
    notes = [f"{path}: {model.cfg.variant}, step {run['step']}, {device}"]
    if not text:
        notes.append("no --start: from the beginning of a document")
    if len(prompt) > model.cfg.block_size:
        notes.append(f"--start has {len(prompt)} tokens, the model sees the last {model.cfg.block_size}")
    print("; ".join(notes), file=sys.stderr, flush=True)

    generator = torch.Generator().manual_seed(s.seed)
    made, began = 0, time.perf_counter()
    for i in range(s.num_samples):
        print("-" * 40 + "\n" if i else "", end="")
        print(text, end="", flush=True)
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may span tokens
        for token in model.generate(torch.tensor([prompt], device=device), s.max_new_tokens, s.temperature,
                                    s.top_k, s.top_p, generator, encoding.n_vocab):
            made += 1
            if token.item() == encoding.eot_token:
                break
            print(utf8.decode(encoding.decode_single_token_bytes(token.item())), end="", flush=True)
        print(utf8.decode(b"", final=True))
    took = time.perf_counter() - began
    print(f"{made} tokens, {made / took:,.0f} tokens/s", file=sys.stderr)

if __name__ == "__main__":
    prepare.run(lambda: main(sys.argv[1:]))
