"""Turn text into files of tokens, and read them back.

    python data/prepare.py fineweb_edu                  100 million tokens of educational web text (200 MB)
    python data/prepare.py fineweb_edu --tokens=10_000_000       only the front of it (20 MB)
    python data/prepare.py pydocs                       the documentation inside every Python: no network
    python data/prepare.py my.txt docs.jsonl --name=mine         your own UTF-8 text
    python data/prepare.py shard.bin --name=mine        a token file in llm.c's format, as it is

Each writes to data/<name>/

    train.bin, val.bin   llm.c's format: 256 int32 (20240520, 1, number of tokens, zeros), tokens as uint16
    meta.json            tokenizer, counts, source, and the SHA-256 of both files

A .txt file is one document; a .jsonl file has one a line: {"text": "..."}. Every document starts with the
end-of-text id. Text is taken as it stands: line ends stay, and `<|endoftext|>` in a document is just text.
FineWeb-Edu is by Hugging Face, licence ODC-By 1.0; its tokens come from a dataset of Andrej Karpathy's.
"""

import argparse
import ast
import codecs
import difflib
import functools
import hashlib
import inspect
import json
import os
import platform
import random
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
from collections import namedtuple
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import tiktoken

DATA_DIR = Path(__file__).resolve().parent
MAGIC, VERSION, HEADER = 20240520, 1, 1024  # HEADER: bytes
VOCAB_SIZE = {"gpt2": 50257, "bytes": 257}  # the last id of each is end-of-text
FILES = ("train.bin", "val.bin", "meta.json")
FINEWEB_EDU = {
    "repo": "karpathy/fineweb-edu-100B-gpt2-token-shards",
    "file": "edu_fineweb_train_{:06d}.bin",
    "tokens": 100_000_000,
    "sha256": {4: "c068d8f775f3d5c161703869bb7fcbf9e3039ee0c1be875def40b2f78f0cddc3",
               5: "b0bb385b80d8029e8e2c7181d60616883aff3f5004b349bedff38c195ac43c45"},
}
TRIES, BACKOFF, TIMEOUT = 5, 1.0, (10, 30)  # waits of 1, 2, 4, 8 s; seconds to connect, and without a byte

class UserError(Exception):
    """Something the user can mend; the message is one line that says what, where and what to do."""

    def __str__(self):
        return " ".join(super().__str__().split())

# ---- Tokenizers -----------------------------------------------------------------------------------------
def get_tokenizer(name):
    """The tiktoken.Encoding called `gpt2` or `bytes`; UserError if there is none or it cannot be loaded."""
    if name == "bytes":  # an id is a byte's value; the pattern only cuts text into short pieces
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,64}", special_tokens={"<|endoftext|>": 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)}, explicit_n_vocab=257)
    if name != "gpt2":
        raise UserError(f"unknown tokenizer {name}: choose from {', '.join(VOCAB_SIZE)}")
    import requests  # here and in download() alone: nothing else may touch the network
    impatient = functools.partial(requests.get, timeout=(5, 20))  # tiktoken itself would wait for ever
    try:
        with mock.patch.object(requests, "get", impatient):
            return tiktoken.get_encoding("gpt2")
    except Exception as error:
        raise UserError(
            f"cannot load the gpt2 tokenizer ({type(error).__name__}): tiktoken takes vocab.bpe and "
            "encoder.json from https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/ once and "
            "keeps them in the folder TIKTOKEN_CACHE_DIR names: go online, copy that folder, or prepare "
            "a text with --tokenizer=bytes") from error

# Up to 4,000 characters, to the end of a word: gpt2 never joins a word to the space after it, so a cut there
# changes no token. A run with no such place is cut anyway, as tiktoken is slow on long ones.
PIECE = re.compile(r".{1,4000}(?<=\S)(?=[ \t\r\n]|\Z)|.{1,4000}", re.DOTALL)

def pieces(blocks):
    """Cuts a document, given as blocks of text, into pieces that can be encoded one by one."""
    rest = ""
    for block in blocks:
        *done, rest = PIECE.findall(rest + block) or [""]  # the last one may go on in the next block
        yield from done
    yield rest

def encode(documents, tokenizer, path, total):
    """Writes the tokens of all documents, of `total` bytes, to `path`, behind an empty header."""
    tokenizer, done, bar = get_tokenizer(tokenizer), 0, Progress("tokenize", total)
    with open(path, "wb") as file:
        file.write(bytes(HEADER))
        for document in documents:
            file.write(np.array([tokenizer.eot_token], "<u2").tobytes())
            for piece in pieces(document):
                file.write(np.array(tokenizer.encode_ordinary(piece), "<u2").tobytes())
                done += len(piece.encode("utf-8", "replace"))
                bar.at(done)

class Progress:
    """Share, rate and time left of what takes long, as a line on stderr every 5 s."""

    def __init__(self, label, total):
        self.label, self.total, self.first = label, total, None

    def at(self, done):
        now = time.monotonic()
        if self.first is None:  # what an earlier run did says nothing about the rate
            self.first, self.began, self.next = done, now, now + 5
        elif now > self.next and done > self.first:
            self.next, rate, share = now + 5, (done - self.first) / (now - self.began), done / self.total
            print(f"{self.label} [{'#' * int(20 * share):.<20}] {share:4.0%} of {self.total / 1e6:,.0f} MB, "
                  f"{rate / 1e6:.1f} MB/s, {(self.total - done) / rate:.0f} s left", file=sys.stderr)

# ---- Files ----------------------------------------------------------------------------------------------
Scan = namedtuple("Scan", "tokens sha256 counts largest")  # counts: how often each of the 65,536 ids occurs

def header(tokens):
    return np.array([MAGIC, VERSION, tokens] + [0] * 253, "<i4").tobytes()

def read_header(start, path):
    """Number of tokens that the first bytes of a .bin file promise."""
    if len(start) < HEADER:
        raise UserError(f"{path}: {len(start)} bytes, shorter than a header ({HEADER} bytes)")
    magic, version, tokens = np.frombuffer(start[:12], "<i4").tolist()
    if (magic, version) != (MAGIC, VERSION):
        raise UserError(f"{path}: not llm.c's format (starts with {magic}, {version}; not {MAGIC}, 1)")
    return tokens

def scan(path):
    """Reads a .bin file once, in small pieces; UserError unless it is whole."""
    with open(path, "rb") as file:
        start = file.read(HEADER)
        tokens, size = read_header(start, path), os.fstat(file.fileno()).st_size
        if size != HEADER + 2 * tokens:
            raise UserError(f"{path}: {size:,} bytes, {HEADER + 2 * tokens:,} expected: cut or damaged")
        digest, counts = hashlib.sha256(start), np.zeros(65536, np.int64)
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            counts += np.bincount(np.frombuffer(chunk, "<u2"), minlength=65536)
    return Scan(tokens, digest.hexdigest(), counts, int(np.flatnonzero(counts).max(initial=-1)))

def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()

def meta_bytes(meta):
    """The one way to write `meta`, with its own checksum, so that any damage to the file shows."""
    checksum = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**meta, "checksum": checksum}, indent=2) + "\n").encode()

def count_bytes(counts, tokenizer):
    """UTF-8 bytes behind the tokens, end-of-text not counted; None if the tokenizer cannot be loaded."""
    try:
        tokenizer = get_tokenizer(tokenizer)
    except UserError:
        return None
    lengths = [len(tokenizer.decode_single_token_bytes(i)) for i in range(tokenizer.eot_token)]
    return int(counts[:len(lengths)] @ np.array(lengths))

def check_disk(folder, need):
    free = shutil.disk_usage(folder).free
    if free < need:
        raise UserError(f"{folder}: {free / 1e6:,.0f} MB free on this disk, {need / 1e6:,.0f} MB needed")

def build(name, tokenizer, source, data_dir, write):
    """Makes data_dir/name, unless it is there and came from the same source; UserError if it is there and
    came from files of other names, or has another tokenizer. write(path) writes any header and all tokens.
    Files get their names when complete, and count when meta.json fits them.
    """
    folder = Path(data_dir, name)
    try:
        meta = load(name, 1, data_dir).meta
    except UserError:
        meta = None  # missing or damaged: made anew
    if meta and (meta["source"], meta["tokenizer"]) == (source, tokenizer):
        return report(meta, folder, "prepared already")
    files = functools.partial(re.sub, r" \(SHA-256 \w+\)", "")  # edited files may replace their own set
    if meta and name not in ("fineweb_edu", "pydocs") and (
            files(meta["source"]), meta["tokenizer"]) != (files(source), tokenizer):
        raise UserError(f"{folder} holds {meta['tokenizer']} tokens of {meta['source']}: "
                        "give another --name, or delete that folder")
    temporary = {file: folder / f"{file}.{os.getpid()}.tmp" for file in FILES}  # two runs at once do not mix
    train, val = temporary["train.bin"], temporary["val.bin"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.tmp"):  # of a run killed earlier
            if time.time() - path.stat().st_mtime > 60:
                path.unlink()
        write(train)
        n = (train.stat().st_size - HEADER) // 2
        n_val = min(1_000_000, max(n // 100, min(n // 10, 100_000)))
        if n_val < 2 or n >= 2**31:
            raise UserError(f"{source}: {n:,} tokens; there must be at least 20, and fewer than 2**31")
        with open(train, "r+b") as all_tokens, open(val, "wb") as tail:  # what is left of all_tokens is train
            all_tokens.seek(-2 * n_val, os.SEEK_END)
            tail.write(header(n_val) + all_tokens.read())
            all_tokens.truncate(HEADER + 2 * (n - n_val))
            all_tokens.seek(0)
            all_tokens.write(header(n - n_val))
            for file in (all_tokens, tail):
                file.flush()
                os.fsync(file.fileno())
        scans = {"train": scan(train), "val": scan(val)}
        largest, vocab_size = max(s.largest for s in scans.values()), VOCAB_SIZE[tokenizer]
        if largest >= vocab_size:
            raise UserError(f"{source}: largest id {largest}, but {tokenizer} has ids below {vocab_size}: "
                            "these tokens were made by another tokenizer")
        meta = {"format": 1, "name": name, "tokenizer": tokenizer, "vocab_size": vocab_size,
                "tokens": {split: s.tokens for split, s in scans.items()},
                "bytes": {split: count_bytes(s.counts, tokenizer) for split, s in scans.items()},
                "documents": sum(int(s.counts[vocab_size - 1]) for s in scans.values()), "source": source,
                "sha256": {f"{split}.bin": s.sha256 for split, s in scans.items()}}
        with open(temporary["meta.json"], "wb") as file:
            file.write(meta_bytes(meta))
            file.flush()
            os.fsync(file.fileno())
        for file in FILES:  # meta.json last: after a kill in between, load() finds hashes that do not fit
            os.replace(temporary[file], folder / file)
    except OSError as error:
        raise UserError(f"cannot prepare {folder}: {error}") from error
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return report(meta, folder, "done")

def report(meta, folder, state):
    tokens, size = sum(meta["tokens"].values()), meta["bytes"]
    ratio = "unknown" if None in size.values() else f"{sum(size.values()) / tokens:.2f}"
    print(f"{folder}: {state}\n"
          f"  {tokens:,} {meta['tokenizer']} tokens, {meta['documents']:,} documents, "
          f"{ratio} bytes per token\n"
          f"  {meta['tokens']['train']:,} for training, {meta['tokens']['val']:,} for validation\n"
          f"  from {meta['source']}\n"
          f"  next: python train.py --dataset={meta['name'] if folder.parent == DATA_DIR else folder}")

# ---- Source 1: your own files ---------------------------------------------------------------------------
def read_text(path):
    """The text of a file in blocks, without a byte order mark; UserError names the line that is not UTF-8."""
    decoder, line, empty = codecs.getincrementaldecoder("utf-8-sig")(), 1, True
    with open(path, "rb") as file:
        raw = True
        while raw:
            raw = file.read(1 << 20)
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                line += error.object[:error.start].count(b"\n")
                raise UserError(f"{path}, line {line}: not UTF-8 ({error.reason})") from error
            line, empty = line + text.count("\n"), empty and not text
            yield text
    if empty:
        raise UserError(f"{path}: empty file")

def read_jsonl(path):
    """The "text" of each line; lines without any character are skipped. UserError names file and line."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number}: not JSON in UTF-8 ({error})") from error
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                raise UserError(f'{path}, line {number}: not {{"text": "..."}}')
            if record["text"]:
                yield record["text"]

def documents(paths):
    """Each document as an iterable of blocks of text."""
    for path in paths:
        if path.suffix.lower() == ".jsonl":
            yield from ([text] for text in read_jsonl(path))
        else:
            yield read_text(path)

def prepare_files(paths, name=None, tokenizer="gpt2", data_dir=DATA_DIR):
    """Prepares text, .jsonl or one .bin file as data_dir/name (by default, the first file's name)."""
    paths = [Path(path) for path in paths]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: {'a directory' if path.is_dir() else 'no such file'} "
                            "(a source is fineweb_edu, pydocs, or files of your own)")
    shards = [path for path in paths if path.suffix.lower() == ".bin"]
    if shards and len(paths) > 1:
        raise UserError(f"{shards[0]}: a .bin file has to be the only source")
    name = paths[0].stem if name is None else name
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII) or name in ("fineweb_edu", "pydocs"):
        raise UserError(f"--name={name}: choose another name, of letters, digits, '_', '-', '.'")
    if shards:
        scan(paths[0])
    source = ", ".join(f"{path.name} (SHA-256 {sha256(path)[:16]})" for path in paths)
    total = sum(path.stat().st_size for path in paths)

    def write(path):
        check_disk(path.parent, total if tokenizer == "gpt2" or shards else 2 * total)
        if shards:
            shutil.copyfile(paths[0], path)
        else:
            encode(documents(paths), tokenizer, path, total)

    build(name, tokenizer, source, data_dir, write)

# ---- Source 2: the documentation inside Python ----------------------------------------------------------
SKIP = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}

def docstrings(node, name):
    """Name and docstring of a parsed module or class and of what it defines."""
    text = ast.get_docstring(node)
    if text:
        yield f"{name}\n\n{text}\n"
    for child in node.body if isinstance(node, (ast.Module, ast.ClassDef)) else ():
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from docstrings(child, f"{name}.{child.name}")

def python_documents():
    """The language reference's topics, then one document per module of the standard library, shuffled."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some systems ship a Python without it
        topics = {}
    found = [topics[name] for name in sorted(topics)]
    library = Path(sysconfig.get_paths()["stdlib"])
    for root, folders, files in os.walk(library):
        folders[:] = sorted({*folders} - SKIP)
        for path in sorted(Path(root, file) for file in files if file.endswith(".py")):
            try:  # read, never imported
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, RecursionError):
                continue
            name = ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
            found.append("\n".join(docstrings(tree, name)))
    found = [text for text in found if text]
    random.Random(0).shuffle(found)
    return found

def prepare_pydocs(data_dir=DATA_DIR):
    """Prepares data_dir/pydocs, about 2 MB of text as bytes, in seconds and without a network; UserError."""
    def write(path):
        found = python_documents()
        encode(([text] for text in found), "bytes", path, sum(map(len, found)))

    build("pydocs", "bytes", f"the documentation inside Python {platform.python_version()}", data_dir, write)

# ---- Source 3: FineWeb-Edu ------------------------------------------------------------------------------
def download(url, part, size, total):
    """Brings the first `size` of the `total` bytes of `url` to `part`, going on from what is there."""
    import requests
    from urllib3.exceptions import MaxRetryError
    token, bar, problem = os.environ.get("HF_TOKEN", "").strip(), Progress("download", size), ""
    headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})}
    for attempt in range(TRIES):
        at = part.stat().st_size if part.exists() else 0
        wait = BACKOFF * 2**attempt
        try:
            if at < size:
                headers["Range"] = f"bytes={at}-{size - 1}"
                with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
                    status = answer.status_code
                    if status in (200, 206):
                        problem = receive(answer, part, at, size, total, bar)
                    elif status in (408, 429) or status >= 500:
                        problem, after = f"HTTP status {status}", answer.headers.get("Retry-After", "")
                        wait = max(wait, min(int(after), 60)) if after.isdecimal() else wait
                    else:
                        raise UserError(f"{url}: HTTP status {status} {answer.reason}")
        except requests.RequestException as error:
            never_connected = isinstance((*error.args, None)[0], MaxRetryError)
            if never_connected or isinstance(error, ValueError):  # ValueError: no valid address
                raise UserError(f"cannot reach {url} ({type(error).__name__}): go online, set HF_ENDPOINT to "
                                "a mirror, or prepare pydocs or your own files instead") from error
            problem = f"the connection broke or stalled ({type(error).__name__})"
        if part.exists() and part.stat().st_size >= size:
            os.truncate(part, size)  # the last chunk went on, or an earlier run wanted more
            return
        if attempt < TRIES - 1:
            print(f"{url}: {problem}; again in {wait:.0f} s", file=sys.stderr)
            time.sleep(wait)
    raise UserError(f"{url}: {problem}, {TRIES} times; the same command goes on from what has arrived")

def receive(answer, part, at, size, total, bar):
    """Writes the body of a good answer to `part`, from byte `at`; returns what went wrong if not all came."""
    if answer.status_code == 206:
        promised = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        fits = promised and (int(promised[1]), int(promised[2])) == (at, total)
    else:  # this server cannot give a part: all over again
        at, fits = 0, answer.headers.get("Content-Length", str(total)) == str(total)
    if not fits:
        return "the server offers other bytes than asked for"
    with open(part, "r+b" if at else "wb") as file:
        file.seek(at)
        for chunk in answer.iter_content(1 << 14):
            file.write(chunk)
            at += len(chunk)
            bar.at(at)
            if at >= size:
                break
    return "the answer was too short"

def prepare_fineweb_edu(tokens=None, shard=4, data_dir=DATA_DIR):
    """Prepares data_dir/fineweb_edu from a shard, or its first `tokens`; UserError if it cannot be had."""
    known, most = FINEWEB_EDU["sha256"], FINEWEB_EDU["tokens"]
    if shard not in known:
        raise UserError(f"--shard={shard}: choose from {', '.join(map(str, known))}")
    tokens = most if tokens is None else tokens
    if not 20 <= tokens <= most:
        raise UserError(f"--tokens={tokens}: must be from 20 to {most:,}")
    file, size, total = FINEWEB_EDU["file"].format(shard), HEADER + 2 * tokens, HEADER + 2 * most
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
    url = f"{endpoint}/datasets/{FINEWEB_EDU['repo']}/resolve/main/{file}"

    def write(path):
        part = path.with_name(file + ".part")
        check_disk(path.parent, size - (part.stat().st_size if part.exists() else 0))
        download(url, part, size, total)
        with open(part, "rb") as front:
            start = front.read(HEADER)
        if start != header(most) or tokens == most and sha256(part) != known[shard]:
            part.unlink()
            raise UserError(f"{url}: what came has a wrong header or SHA-256 and was deleted: try again")
        os.replace(part, path)

    source = f"{FINEWEB_EDU['repo']}, {file}, first {tokens:,} tokens (FineWeb-Edu, licence ODC-By 1.0)"
    build("fineweb_edu", "gpt2", source, data_dir, write)

# ---- Reading --------------------------------------------------------------------------------------------
class Split:
    """The tokens of one .bin file, read from disk when asked for: memory stays flat however much is read."""

    def __init__(self, path, tokens):
        self.path, self.tokens, self.lock = path, tokens, threading.Lock()
        self.file = open(path, "rb", buffering=0)

    def __len__(self):
        return self.tokens

    def window(self, start, length):
        """Tokens start ... start + length - 1, int64; IndexError if they are not all there."""
        if not 0 <= start <= start + length <= self.tokens:
            raise IndexError(f"window {start} + {length} of {self.tokens} tokens")
        with self.lock:  # two steps, as Windows has no os.pread
            self.file.seek(HEADER + 2 * int(start))
            raw = self.file.read(2 * int(length))
        if len(raw) != 2 * length:
            raise UserError(f"{self.path}: became shorter while it was in use")
        return np.frombuffer(raw, "<u2").astype(np.int64)

def prepared(data_dir=DATA_DIR):
    """Sorted names of the sets in data_dir."""
    return sorted(path.parent.name for path in Path(data_dir).glob("*/meta.json"))

def load(name, block_size, data_dir=DATA_DIR, vocab_size=None):
    """Opens a prepared set (a name in data_dir, or a folder): .meta, .tokenizer, .vocab_size, .fingerprint,
    and the splits .train and .val. All is checked here: UserError unless both files are whole and unchanged,
    have block_size + 1 tokens or more, and no id reaches vocab_size (None: the tokenizer's).
    """
    remedy = f"python data/prepare.py {name if name in ('fineweb_edu', 'pydocs') else 'FILE --name=NAME'}"
    folder = Path(data_dir, name) if Path(data_dir, name, "meta.json").is_file() else Path(name)
    if not (folder / "meta.json").is_file():
        there = ", ".join(prepared(data_dir)) or "nothing"
        raise UserError(f"no data called {name} in {data_dir} (there: {there}); make it: {remedy}")
    splits = {}
    try:
        raw = (folder / "meta.json").read_bytes()
        meta = json.loads(raw)
        if not isinstance(meta, dict) or meta.pop("checksum", None) is None or meta_bytes(meta) != raw:
            raise ValueError("it does not match its own checksum")
        if meta["format"] != 1:
            raise ValueError(f"it has format {meta['format']}, this program knows 1")
        for split in ("train", "val"):
            path = folder / f"{split}.bin"
            found = scan(path)
            if found.sha256 != meta["sha256"][path.name]:
                raise ValueError(f"{path.name} is not the file that meta.json describes (SHA-256)")
            splits[split] = Split(path, found.tokens)
            facts = f"the {split} split has {found.tokens:,} tokens, largest id {found.largest} ({path})"
            if found.tokens < block_size + 1:
                raise UserError(f"{facts}; block_size is {block_size}, at most {found.tokens - 1} fits: "
                                "use a smaller block_size or more text")
            if found.largest >= (vocab_size or meta["vocab_size"]):
                raise UserError(f"{facts}; vocab_size is {vocab_size}, the tokenizer {meta['tokenizer']} "
                                f"needs {meta['vocab_size']}")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot be used, {error}; make it again: {remedy}") from error
    fingerprint = hashlib.sha256(json.dumps(meta["sha256"], sort_keys=True).encode()).hexdigest()[:16]
    return SimpleNamespace(meta=meta, tokenizer=meta["tokenizer"], vocab_size=meta["vocab_size"],
                           fingerprint=fingerprint, **splits)

# ---- Command line ---------------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    """argparse for every program: no abbreviations, an error is one line and names the nearest flag."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message):
        typo = re.search(r"unrecognized arguments: (--\w+)", message)
        near = difflib.get_close_matches(typo[1], self._option_string_actions) if typo else []
        self.exit(2, f"{self.prog}: {message}{f' (did you mean {near[0]}?)' if near else ''}\n")

    def add_fields(self, cls, skip=""):
        """A flag for each field of a dataclass but `skip`, with type and default; its comment is the help."""
        notes = dict(re.findall(r"^    (\w+): .*?# (.*)$", inspect.getsource(cls), re.M))
        for field in (field for field in fields(cls) if field.name != skip):
            kind = {"type": field.type}
            if field.type is bool:
                kind = {"type": boolean, "nargs": "?", "const": True}
            self.add_argument("--" + field.name, default=field.default, metavar=field.type.__name__.upper(),
                              **kind, help=notes[field.name].replace("%", "%%") + " [%(default)s]")

def boolean(text):
    """True or False from the text of a flag; a bare --flag is True."""
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "1", "yes")

def discard_stdout():
    """Nobody reads it any more: what is left in it must not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

def run(main):
    """Runs a program to its end: what a user can mend is one line on stderr and exit status 1, Ctrl-C 130."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a text may not fit the console
    try:
        status = main()
        sys.stdout.flush()
        sys.exit(status)
    except BrokenPipeError:  # the reader went away: nothing is wrong, and nobody listens
        discard_stdout()
        sys.exit(141)  # as by SIGPIPE
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    except (UserError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        memory = isinstance(error, (MemoryError, RuntimeError))
        hint = "not enough memory, take smaller sizes: " if memory else ""
        print(f"{Path(sys.argv[0]).name}: {hint}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(1)

def main(argv=None):
    """Runs the command line; returns the exit status."""
    parser = Parser(description=__doc__)
    parser.add_argument("source", nargs="+", help="fineweb_edu, pydocs, or files: text, .jsonl or one .bin")
    parser.add_argument("--tokens", type=int, metavar="N", help="fineweb_edu: the first N (default: all)")
    parser.add_argument("--shard", type=int, help="fineweb_edu: which shard, 4 or 5 (default: 4)")
    parser.add_argument("--name", help="files: name of the folder to make (default: that of the first file)")
    parser.add_argument("--tokenizer", choices=list(VOCAB_SIZE), help="files: (default: gpt2)")
    parser.add_argument("--data_dir", default=DATA_DIR, help="where to make it (default: %(default)s)")
    args = vars(parser.parse_args(argv))
    source, data_dir = args.pop("source"), Path(args.pop("data_dir"))
    given = {option: value for option, value in args.items() if value is not None}
    use, allowed = functools.partial(prepare_files, source), ("name", "tokenizer")
    if source == ["fineweb_edu"]:
        use, allowed = prepare_fineweb_edu, ("tokens", "shard")
    elif source == ["pydocs"]:
        use, allowed = prepare_pydocs, ()
    for option in given:
        if option not in allowed:
            raise UserError(f"--{option} has no meaning for {source[0]}")
    use(**given, data_dir=data_dir)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files are removed
    run(main)
