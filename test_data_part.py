"""Tests of data/prepare.py: offline, in temporary folders."""

import hashlib
import http.server
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from data import prepare
from data.prepare import UserError


def write_bin(path, tokens):
    path.write_bytes(prepare.header(len(tokens)) + np.array(tokens, "<u2").tobytes())
    return path


def command(argv):
    """The exit status of `python data/prepare.py ARGV`; its message goes to stderr."""
    try:
        return prepare.main(argv) or 0
    except KeyboardInterrupt:
        return 130
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def make(folder, text, *options, name="set", suffix=".txt"):
    """Prepares `text` (str or bytes) as folder/name with the bytes tokenizer; the exit status."""
    path = folder / f"source{suffix}"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return command([str(path), f"--name={name}", f"--data_dir={folder}", "--tokenizer=bytes", *options])


def all_tokens(folder, name="set"):
    data = prepare.load(name, 1, folder)
    return np.concatenate([split.window(0, len(split)) for split in (data.train, data.val)]).tolist()


def one_error_line(capsys):
    out, err = capsys.readouterr()
    assert out == "" and ": " in err and err.count("\n") == 1, (out, err)
    return err


def snapshot(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def gpt2():
    """The gpt2 tokenizer, if its files are on this machine: tests never download."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("requests.get", lambda *a, **k: (_ for _ in ()).throw(OSError("offline")))
            return prepare.get_tokenizer("gpt2")
    except UserError:
        pytest.skip("needs gpt2's vocabulary in TIKTOKEN_CACHE_DIR")


TEXTS = ["plain words", "caf\u00e9 \u4f60\u597d \U0001F600 \u0301", "a\r\nb\rc\n\n\n  d\t",
         "<|endoftext|> as text", "", " "]


def test_data_bytes_tokenizer_is_utf8():
    """Catches ids of `bytes` that are not the UTF-8 bytes, or end-of-text not being 256."""
    tokenizer = prepare.get_tokenizer("bytes")
    for text in TEXTS + ["x" * 1000 + "\n" * 1000]:
        assert tokenizer.encode_ordinary(text) == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.eot_token, tokenizer.n_vocab) == (256, 257)


def test_data_pieces_keep_gpt2_tokens(gpt2, monkeypatch):
    """Catches cutting a text where gpt2 would have made one token, in a block or between two."""
    short = prepare.PIECE.pattern.replace("4000", "60")
    monkeypatch.setattr(prepare, "PIECE", re.compile(short, prepare.PIECE.flags))
    rng = random.Random(0)
    words = ["word", "Sam's", "12", "!?", "\u00e9", "!\x1c!", "\x1c", "...", "\u4f60\u597d"]
    spaces = [" ", " ", "  ", "\n", "\r\n", "\u00a0", "\u2003", "\t", "    \n\n  "]
    for block in (7, 61, 1000, 100_000):
        text = "".join(rng.choice(words) + rng.choice(spaces) for _ in range(3000))
        got = list(prepare.pieces(text[i:i + block] for i in range(0, len(text), block)))
        assert "".join(got) == text and len(got) > 200
        assert [i for piece in got for i in gpt2.encode_ordinary(piece)] == gpt2.encode_ordinary(text)


@pytest.mark.parametrize("character", ["a", " ", "=", "\n"])
def test_data_long_run_takes_seconds(gpt2, character):
    """Catches handing a run of a million equal characters to the tokenizer in one piece."""
    text, began = character * 1_000_000, time.monotonic()
    got = list(prepare.pieces([text]))
    assert max(map(len, got)) <= 4000
    assert gpt2.decode([i for piece in got for i in gpt2.encode_ordinary(piece)]) == text
    assert time.monotonic() - began < 20


def test_data_documents_and_separators(tmp_path, capsys):
    """Catches a separator missing, doubled or behind its document, and `<|endoftext|>` in a text made one."""
    lines = [json.dumps({"text": text, "id": 1}) for text in TEXTS] + ["", "  "]
    assert make(tmp_path, "\n".join(lines), suffix=".jsonl") == 0
    expected = [i for text in TEXTS if text for i in (256, *text.encode())]
    assert all_tokens(tmp_path) == expected
    meta = prepare.load("set", 1, tmp_path).meta
    assert meta["documents"] == 5 and sum(meta["bytes"].values()) == len(expected) - 5
    assert sum(meta["tokens"].values()) == len(expected) and meta["vocab_size"] == 257
    out = capsys.readouterr().out
    for part in (f"{len(expected)} bytes tokens", "5 documents", "next: python train.py --dataset="):
        assert part in out


def test_data_text_is_kept_exactly(tmp_path):
    """Catches line ends converted, a byte order mark kept, or a character cut between two blocks."""
    text = "\u4f60\r\n" + "\u00e9\U0001F600 \r" * 250_000
    assert make(tmp_path, b"\xef\xbb\xbf" + text.encode()) == 0
    assert bytes(all_tokens(tmp_path)[1:]) == text.encode()


def test_data_gpt2_roundtrip(tmp_path, gpt2):
    """Catches gpt2 files that do not decode to the text, and bytes of a split that are not its own."""
    text = "Hello <|endoftext|> world, caf\u00e9 \U0001F600.\n" * 50
    assert make(tmp_path, text, "--tokenizer=gpt2") == 0
    tokens = all_tokens(tmp_path)
    assert tokens[0] == 50256 and 50256 not in tokens[1:] and gpt2.decode(tokens[1:]) == text
    data = prepare.load("set", 1, tmp_path)
    val = data.val.window(0, len(data.val)).tolist()
    assert data.meta["bytes"]["val"] == len(gpt2.decode_bytes(val))
    assert sum(data.meta["bytes"].values()) == len(text.encode())


@pytest.mark.parametrize("n, n_val", [(20, 2), (1000, 100), (2_000_000, 100_000), (12_000_000, 120_000)])
def test_data_split_sizes(tmp_path, n, n_val):
    """Catches a split of another size than 1% (small sets: 10% or 100,000), and tokens lost or repeated."""
    tokens = (np.arange(n) % 50000).astype("<u2")
    assert command([str(write_bin(tmp_path / "x.bin", tokens)), f"--data_dir={tmp_path}"]) == 0
    data = prepare.load("x", 1, tmp_path)
    assert (len(data.train), len(data.val)) == (n - n_val, n_val)
    assert data.val.window(0, n_val).tolist() == tokens[n - n_val:].tolist()
    assert data.train.window(n - n_val - 5, 5).tolist() == tokens[n - n_val - 5:n - n_val].tolist()


def test_data_local_shard_as_it_is(tmp_path, capsys):
    """Catches a shard read from a wrong offset or byte order, and foreign ids taken for gpt2's."""
    raw = np.array([20240520, 1, 100] + [0] * 253, "<i4").tobytes() + np.arange(100, dtype="<u2").tobytes()
    (tmp_path / "s.bin").write_bytes(raw)
    assert command([str(tmp_path / "s.bin"), "--name=set", f"--data_dir={tmp_path}"]) == 0
    assert all_tokens(tmp_path) == list(range(100))
    before = snapshot(tmp_path / "set")
    capsys.readouterr()
    path = write_bin(tmp_path / "t.bin", [50257] * 100)
    assert command([str(path), "--name=set", f"--data_dir={tmp_path}"]) == 1
    assert "50257" in one_error_line(capsys) and snapshot(tmp_path / "set") == before


BAD = {
    "zero tokens": (["fineweb_edu", "--tokens=0"], "--tokens=0"),
    "too many tokens": (["fineweb_edu", "--tokens=100_000_001"], "100,000,000"),
    "shard": (["fineweb_edu", "--shard=3"], "4, 5"),
    "no number": (["fineweb_edu", "--tokens=many"], "many"),
    "tokenizer": (["good.txt", "--tokenizer=foo"], "gpt2"),
    "name with a slash": (["good.txt", "--name=a/b"], "--name=a/b"),
    "name upwards": (["good.txt", "--name=.."], "--name=.."),
    "reserved name": (["good.txt", "--name=pydocs"], "--name=pydocs"),
    "missing": (["none.txt"], "none.txt"),
    "directory": (["folder"], "directory"),
    "two sources": (["good.bin", "good.txt"], "good.bin"),
    "magic": (["magic.bin"], "magic.bin"),
    "cut": (["cut.bin"], "cut.bin"),
    "odd": (["odd.bin"], "odd.bin"),
    "no header": (["tiny.bin"], "tiny.bin"),
    "empty": (["good.txt", "empty.txt"], "empty.txt: empty"),
    "short": (["short.txt"], "short.txt"),
    "latin-1": (["latin.txt"], "latin.txt, line 3"),
    "cut character": (["torn.txt"], "torn.txt, line 2"),
    "bad JSON": (["bad.jsonl"], "bad.jsonl, line 2"),
    "no text": (["field.jsonl"], "field.jsonl, line 3"),
    "no object": (["list.jsonl"], "list.jsonl, line 1"),
    "meaningless option": (["pydocs", "--tokens=50"], "--tokens"),
    "no source": ([], "source"),
    "typo": (["good.txt", "--tokeniser=bytes"], "did you mean --tokenizer"),
}


@pytest.mark.parametrize("case", BAD)
def test_data_bad_input_is_one_line(tmp_path, monkeypatch, capsys, case):
    """Catches a traceback, a status of 0, or files left behind, for wrong options and sources."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    good = prepare.header(100) + bytes(200)
    for name, content in {
            "good.txt": b"good " * 50, "good.bin": good, "cut.bin": good[:-2], "magic.bin": b"\0" + good[1:],
            "odd.bin": good + b"1", "tiny.bin": good[:5], "empty.txt": b"", "short.txt": b"ab",
            "latin.txt": b"a\nb\ncaf\xe9 " + b"c" * 50, "torn.txt": b"a" * 50 + b"\n\xc3",
            "bad.jsonl": b'{"text": "a"}\n{"text": \n', "field.jsonl": b'\n{"text": "a"}\n{"txt": "a"}\n',
            "list.jsonl": b'["text"]\n'}.items():
        (tmp_path / name).write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    args, expected = BAD[case]
    files = args and args[0] not in ("fineweb_edu", "pydocs")
    extra = ["--tokenizer=bytes"] if files and ".bin" not in args[0] and "--tokeni" not in args[-1] else []
    try:
        status = command([*args, f"--data_dir={tmp_path / 'new'}", *extra])
    except SystemExit as error:
        status = error.code
    assert status not in (0, None) and expected in one_error_line(capsys)
    assert [p for p in sorted(tmp_path.rglob("*")) if p.name != "new"] == before
    assert not (tmp_path / "new").exists() or not any((tmp_path / "new").iterdir())


def test_data_second_run_does_nothing(tmp_path, capsys):
    """Catches work done twice, a changed source not noticed, and a damaged set taken for finished."""
    make(tmp_path, "one text " * 20)
    before, stamp = snapshot(tmp_path / "set"), (tmp_path / "set" / "meta.json").stat().st_mtime_ns
    capsys.readouterr()
    assert make(tmp_path, "one text " * 20) == 0
    assert "prepared already" in capsys.readouterr().out
    assert (tmp_path / "set" / "meta.json").stat().st_mtime_ns == stamp
    (tmp_path / "set" / "val.bin").write_bytes(b"damage")
    assert make(tmp_path, "one text " * 20) == 0 and snapshot(tmp_path / "set") == before
    assert make(tmp_path, "other text " * 20) == 0
    assert bytes(all_tokens(tmp_path)[1:]) == b"other text " * 20


def test_data_failure_keeps_what_was_there(tmp_path, monkeypatch, capsys):
    """Catches an old set destroyed, or temporary files left, on a full disk or Ctrl-C."""
    make(tmp_path, "one text " * 20)
    before = snapshot(tmp_path / "set")

    def full(*args):
        raise OSError(28, "No space left on device")
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(prepare.os, name, full)
            capsys.readouterr()
            assert make(tmp_path, "other text " * 20) == 1
            assert "No space left" in one_error_line(capsys) and snapshot(tmp_path / "set") == before
            with pytest.raises(UserError, match="No space left"):  # not an OSError
                prepare.prepare_files([tmp_path / "source.txt"], "set", "bytes", tmp_path)
    monkeypatch.setattr(prepare, "encode", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert make(tmp_path, "other text " * 20) == 130
    assert snapshot(tmp_path / "set") == before
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    capsys.readouterr()
    assert make(tmp_path, "other text " * 20) == 1
    assert "MB free" in one_error_line(capsys) and snapshot(tmp_path / "set") == before


def test_data_killed_between_renames_is_noticed(tmp_path, monkeypatch):
    """Catches a set whose files come from two runs being taken for complete."""
    make(tmp_path, "one text " * 20)
    real, done = os.replace, []

    def killed(source, target):
        if done:
            raise KeyboardInterrupt
        done.append(real(source, target))
    monkeypatch.setattr(prepare.os, "replace", killed)
    assert make(tmp_path, "other text " * 20) == 130
    with pytest.raises(UserError, match="SHA-256"):
        prepare.load("set", 1, tmp_path)
    monkeypatch.undo()
    assert make(tmp_path, "other text " * 20) == 0
    assert bytes(all_tokens(tmp_path)[1:]) == b"other text " * 20


def test_data_stale_temporary_files_are_removed(tmp_path):
    """Catches what a killed run left staying for ever, and a running one's files being taken away."""
    make(tmp_path, "one text " * 20)
    old, new = tmp_path / "set" / "train.bin.1.tmp", tmp_path / "set" / "train.bin.2.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    make(tmp_path, "other text " * 20)
    assert not old.exists() and new.exists()


def test_data_window_reads_the_right_tokens(tmp_path):
    """Catches windows off by one, of a wrong type, short at the end, or mixed up between threads."""
    tokens = np.arange(40_000)
    write_bin(tmp_path / "x.bin", tokens)
    split = prepare.Split(tmp_path / "x.bin", len(tokens))
    assert len(split) == 40_000 and split.window(0, 1).dtype == np.int64
    wrong, real = [], split.file

    class SlowFile:
        read = real.read

        def seek(self, position):
            real.seek(position)
            time.sleep(0.0005)
    split.file = SlowFile()

    def read(seed):
        rng = random.Random(seed)
        for _ in range(100):
            start = rng.randrange(39_900)
            if not np.array_equal(split.window(start, 100), tokens[start:start + 100]):
                wrong.append(start)
    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    split.file = real
    assert wrong == [] and split.window(39_900, 100).tolist() == tokens[-100:].tolist()
    for start, length in ((-1, 5), (39_901, 100), (0, -1)):
        with pytest.raises(IndexError):
            split.window(start, length)
    os.truncate(tmp_path / "x.bin", 2000)
    with pytest.raises(UserError, match="shorter"):
        split.window(39_900, 100)


def test_data_block_size_edge(tmp_path):
    """Catches block_size + 1 tokens being refused, block_size accepted, or a message without numbers."""
    make(tmp_path, "z" * 999)  # 900 + 100 tokens
    assert len(prepare.load("set", 99, tmp_path).val) == 100
    with pytest.raises(UserError) as error:
        prepare.load("set", 100, tmp_path)
    for part in ("val split", "100 tokens", "at most 99", "val.bin", "largest id 122"):
        assert part in str(error.value)


def test_data_ids_beyond_the_model(tmp_path):
    """Catches ids that do not fit the model's vocabulary reaching the embedding."""
    make(tmp_path, "z" * 999)
    assert prepare.load("set", 8, tmp_path, vocab_size=257).vocab_size == 257
    with pytest.raises(UserError, match=r"train split has 900 tokens, largest id 256 .*train\.bin.* 256"):
        prepare.load("set", 8, tmp_path, vocab_size=256)


def test_data_missing_names_the_command(tmp_path):
    """Catches a bare FileNotFoundError for a set that is not there."""
    make(tmp_path, "z" * 99, name="b"), make(tmp_path, "z" * 99, name="a")
    assert prepare.prepared(tmp_path) == ["a", "b"] and prepare.prepared(tmp_path / "none") == []
    with pytest.raises(UserError, match="python data/prepare.py fineweb_edu"):
        prepare.load("fineweb_edu", 8, tmp_path)
    with pytest.raises(UserError, match="a, b"):
        prepare.load("c", 8, tmp_path)
    os.remove(tmp_path / "a" / "val.bin")
    with pytest.raises(UserError, match="val.bin"):
        prepare.load("a", 8, tmp_path)


def test_data_fingerprint_and_path(tmp_path):
    """Catches two different sets with one fingerprint, and a folder's path not being accepted as a name."""
    make(tmp_path, "z" * 99, name="a"), make(tmp_path, "z" * 99, name="b"), make(tmp_path, "y" * 99, name="c")
    a, b, c = (prepare.load(tmp_path / name, 8) for name in "abc")
    assert a.fingerprint == b.fingerprint != c.fingerprint and a.tokenizer == "bytes"


def test_data_meta_with_another_format(tmp_path):
    """Catches a meta.json of another version, or without its checksum, being read as if it were ours."""
    make(tmp_path, "z" * 99)
    path = tmp_path / "set" / "meta.json"
    meta = json.loads(path.read_bytes())
    path.write_text(json.dumps(meta, indent=2))
    with pytest.raises(UserError, match="checksum"):
        prepare.load("set", 8, tmp_path)
    del meta["checksum"]
    path.write_bytes(prepare.meta_bytes({**meta, "format": 2}))
    with pytest.raises(UserError, match="format 2"):
        prepare.load("set", 8, tmp_path)


@pytest.mark.slow
def test_data_random_corruption_is_noticed(tmp_path):
    """Catches damage (bits flipped, bytes swapped, files cut) that loads, or ends in another exception."""
    make(tmp_path, "some text, all of it different: " + " ".join(map(str, range(300))))
    prepare.load("set", 8, tmp_path)
    good, rng = {name: (tmp_path / "set" / name).read_bytes() for name in prepare.FILES}, random.Random(0)
    for _ in range(200):
        name, kind = rng.choice(prepare.FILES), rng.choice(("flip", "cut", "swap"))
        bad = bytearray(good[name])
        i, j = rng.randrange(len(bad)), rng.randrange(len(bad))
        if kind == "flip":
            bad[i] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del bad[i:]
        else:
            bad[i], bad[j] = bad[j], bad[i]
        (tmp_path / "set" / name).write_bytes(bad)
        if bad != good[name]:
            with pytest.raises(UserError) as error:
                prepare.load("set", 8, tmp_path)
            assert "\n" not in str(error.value)
        (tmp_path / "set" / name).write_bytes(good[name])
    prepare.load("set", 8, tmp_path)


@pytest.mark.slow
def test_data_memory_stays_flat(tmp_path):
    """Catches memory that grows with the tokens prepared or the windows read."""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("needs /proc")
    code = ("import sys; from data import prepare; import numpy as np\n"
            "def rss(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
            "folder = sys.argv[1]; start = rss()\n"
            "command([folder + '/big.txt', '--tokenizer=bytes', '--data_dir=' + folder])\n"
            "train = prepare.load('big', 8, folder).train\n"
            "for i in np.random.default_rng(0).integers(0, len(train) - 256, 20_000): train.window(i, 256)\n"
            "print((rss() - start) // 1024)\n")
    (tmp_path / "big.txt").write_bytes(b"a few words of text " * 2_000_000)  # 40 MB; as a list 320 MB
    root = os.path.dirname(os.path.dirname(os.path.abspath(prepare.__file__)))
    command = [sys.executable, "-c", code, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert run.returncode == 0 and int(run.stdout.split()[-1]) < 60, run.stdout + run.stderr


@pytest.mark.slow
def test_data_pydocs(tmp_path):
    """Catches the built-in text being slow, small, different from run to run, or importing what it reads."""
    began, modules = time.monotonic(), set(sys.modules)
    prepare.prepare_pydocs(tmp_path / "a")
    assert time.monotonic() - began < 30
    assert not {"antigravity", "this", "turtle"} & (set(sys.modules) - modules)
    prepare.prepare_pydocs(tmp_path / "b")
    a, b = (prepare.load("pydocs", 64, tmp_path / name) for name in "ab")
    assert a.fingerprint == b.fingerprint and a.tokenizer == "bytes"
    assert len(a.train) > 1_000_000 and len(a.val) == 100_000 and a.meta["documents"] > 300
    text = bytes(i for i in a.train.window(0, len(a.train)).tolist() if i < 256)
    assert b"Return" in text and b"Traceback" in text


# The network: a server on this machine that misbehaves as told, one word a request.


class Shard:
    """A small fake shard and a server that answers request i with behaviour i (the last one repeats)."""

    def __init__(self, tokens=30000):
        ids = np.random.default_rng(0).integers(0, 50257, tokens).astype("<u2")
        self.raw, self.behaviour, self.requests = prepare.header(tokens) + ids.tobytes(), ["good"], []
        shard = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                number = len(shard.requests)
                shard.requests.append((self.path, dict(self.headers)))
                shard.answer(self, shard.behaviour[min(number, len(shard.behaviour) - 1)])
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, handler, how):
        if how.isdecimal():
            handler.send_response(int(how))
            if how == "429":
                handler.send_header("Retry-After", "1")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers["Range"]).groups())
        body, total = self.raw[first:last + 1], len(self.raw)
        if how == "page":  # as a hotel's login page does
            body = b"<html>please log in</html>"
        elif how == "whole":
            body = self.raw
        elif how == "damaged":
            body = body[:-1] + bytes([body[-1] ^ 1])
        handler.send_response(200 if how in ("whole", "page") else 206)
        if how not in ("whole", "page"):
            start = first + 7 if how == "shifted" else first
            handler.send_header("Content-Range", f"bytes {start}-{last}/{total + (how == 'total')}")
        handler.send_header("Content-Length", str(len(body) + 100 * (how == "long")))
        handler.end_headers()
        handler.wfile.write(body[:len(body) // 2] if how in ("cut", "stall") else body)
        if how == "stall":
            handler.wfile.flush()
            time.sleep(5)


@pytest.fixture
def shard(monkeypatch):
    shard = Shard()
    monkeypatch.setattr(prepare, "BACKOFF", 0.01)
    monkeypatch.setattr(prepare, "TIMEOUT", (5, 0.3))
    monkeypatch.setitem(prepare.FINEWEB_EDU, "tokens", 30000)
    monkeypatch.setitem(prepare.FINEWEB_EDU, "sha256", {4: hashlib.sha256(shard.raw).hexdigest()})
    monkeypatch.setenv("HF_ENDPOINT", shard.url + "/")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(prepare, "count_bytes", lambda counts, tokenizer: None)  # might use the network
    yield shard
    shard.server.shutdown()
    shard.server.server_close()


def fetch(folder, *options):
    return command(["fineweb_edu", f"--data_dir={folder}", *options])


def folder_files(folder):
    return sorted(path.name for path in folder.glob("fineweb_edu/*"))


@pytest.mark.parametrize("behaviour, requests", [
    (["good"], 1), (["cut", "cut", "good"], 3), (["stall", "good"], 2), (["429", "good"], 2),
    (["503", "good"], 2), (["408", "good"], 2), (["long", "good"], 2), (["whole"], 1), (["cut", "whole"], 2),
    (["shifted", "total", "good"], 3), (["page", "good"], 2)])
def test_data_download_survives(tmp_path, shard, capsys, behaviour, requests):
    """Catches a break, stall, rate limit or lying server that ends a download or puts wrong bytes into it."""
    shard.behaviour, began = behaviour, time.monotonic()
    assert fetch(tmp_path) == 0
    assert time.monotonic() - began >= (1 if "429" in behaviour else 0)  # Retry-After
    assert time.monotonic() - began < 4  # a stall is not waited out
    assert len(shard.requests) == requests and folder_files(tmp_path) == sorted(prepare.FILES)
    path, headers = shard.requests[0]
    assert path == ("/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/main/"
                    "edu_fineweb_train_000004.bin") and headers["Authorization"] == "Bearer secret"
    assert np.array(all_tokens(tmp_path, "fineweb_edu"), "<u2").tobytes() == shard.raw[1024:]
    out = capsys.readouterr().out
    assert "ODC-By" in out and prepare.load("fineweb_edu", 8, tmp_path).meta["bytes"]["val"] is None
    assert fetch(tmp_path) == 0 and len(shard.requests) == requests  # once more: nothing to do
    assert "prepared already" in capsys.readouterr().out


@pytest.mark.parametrize("behaviour, requests, message", [
    ("500", 5, "HTTP status 500"), ("404", 1, "HTTP status 404"), ("401", 1, "HTTP status 401"),
    ("shifted", 5, "other bytes"), ("total", 5, "other bytes"), ("damaged", 1, "SHA-256"),
    ("page", 5, "other bytes")])
def test_data_download_gives_up(tmp_path, shard, capsys, behaviour, requests, message):
    """Catches endless or hopeless tries, a wrong file kept, and errors without URL and reason."""
    shard.behaviour = [behaviour]
    assert fetch(tmp_path) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert message in last and "edu_fineweb_train_000004.bin" in last and len(shard.requests) == requests
    assert list(tmp_path.iterdir()) == []


def test_data_download_resumes(tmp_path, shard):
    """Catches starting all over after a kill, or asking for bytes that are there."""
    part = tmp_path / "fineweb_edu" / "edu_fineweb_train_000004.bin.part"
    part.parent.mkdir()
    part.write_bytes(shard.raw[:2000])
    assert fetch(tmp_path) == 0
    assert shard.requests[0][1]["Range"] == f"bytes=2000-{len(shard.raw) - 1}" and len(shard.requests) == 1
    assert np.array(all_tokens(tmp_path, "fineweb_edu"), "<u2").tobytes() == shard.raw[1024:]


def test_data_download_wrong_rest_is_deleted(tmp_path, shard, capsys):
    """Catches a complete but wrong partial file blocking every later try."""
    part = tmp_path / "fineweb_edu" / "edu_fineweb_train_000004.bin.part"
    part.parent.mkdir()
    part.write_bytes(bytes(len(shard.raw)))
    assert fetch(tmp_path) == 1 and not part.exists() and "deleted" in one_error_line(capsys)
    assert fetch(tmp_path) == 0


def test_data_download_front_only(tmp_path, shard):
    """Catches --tokens fetching more than asked for, or keeping the whole shard's count in the header."""
    for tokens, behaviour in ((1_000, "good"), (500, "whole")):
        shard.behaviour = [behaviour]
        assert fetch(tmp_path, f"--tokens={tokens}") == 0
        assert shard.requests[-1][1]["Range"] == f"bytes=0-{1023 + 2 * tokens}"
        got = np.array(all_tokens(tmp_path, "fineweb_edu"), "<u2").tobytes()
        assert got == shard.raw[1024:1024 + 2 * tokens]
    part = tmp_path / "fineweb_edu" / "edu_fineweb_train_000004.bin.part"
    part.write_bytes(shard.raw[:9000])  # an earlier run wanted more
    assert fetch(tmp_path, "--tokens=100") == 0 and len(all_tokens(tmp_path, "fineweb_edu")) == 100


def test_data_offline_is_said_at_once(tmp_path, shard, monkeypatch, capsys):
    """Catches a minute of tries, or a traceback, on a machine without a network."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for endpoint in (f"http://127.0.0.1:{port}", "not an address"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        began = time.monotonic()
        assert fetch(tmp_path) == 1 and time.monotonic() - began < 5
        assert "pydocs" in one_error_line(capsys) and list(tmp_path.iterdir()) == []


def test_data_gpt2_offline_names_the_files(tmp_path, monkeypatch):
    """Catches a traceback when gpt2's vocabulary is not on the machine, and a request without a timeout."""
    import requests
    import tiktoken.registry
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    waits = []

    def offline(url, timeout=None):
        waits.append(timeout)
        raise requests.ConnectionError("offline")
    monkeypatch.setattr(requests, "get", offline)
    with pytest.raises(UserError) as error:
        prepare.get_tokenizer("gpt2")
    for part in ("vocab.bpe", "encoder.json", "TIKTOKEN_CACHE_DIR", "--tokenizer=bytes"):
        assert part in str(error.value)
    assert waits and None not in waits
    with pytest.raises(UserError, match="gpt2, bytes"):
        prepare.get_tokenizer("gpt3")
