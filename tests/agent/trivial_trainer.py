"""A trainer of the contract's shape that does what `training.act` says. It is read as text and put into releases."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

verb = sys.argv[1]
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
out = Path(options["--out"])
settings = json.loads(Path(options["--settings"]).read_text())
act = settings["training"].get("act", {})
names = ("PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "HOME", "SECRET")
seen = {name: os.environ.get(name) for name in names}


def write(name, value):
    part = out / (name + ".tmp")
    part.write_text(json.dumps(value))
    part.rename(out / name)


def say(text):
    # no buffer, which a signal handler must not enter while it is in use
    os.write(1, f"{text}\n".encode())


def say_forever():
    number = 0
    while True:
        say(f"line {number}")
        number += 1
        time.sleep(0.05)


def checkpoint(step):
    folder = out / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    weights = b"w" * 100
    (folder / "model.safetensors").write_bytes(weights)
    sha256 = hashlib.sha256(weights).hexdigest()
    listed = {"path": "model.safetensors", "size": len(weights), "sha256": sha256, "role": "weights"}
    manifest = {"v": 1, "kind": "checkpoint", "step": step, "files": [listed]}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def stop(*_):
    checkpoint(1)
    say("the last line")
    write("result.json", {"outcome": "stopped"})
    os._exit(20)


def leave_grandchild(seconds):
    # its own session: no signal to the job's group reaches it
    code = f"import time\nfor i in range({seconds * 50}):\n    print('grandchild', flush=True); time.sleep(0.02)"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True).pid


# before anything by which somebody could tell that it runs
if act.get("hang") or "records" in act:
    signal.signal(signal.SIGUSR1, lambda *_: say("stack of every thread"))
if verb == "run" and act.get("stubborn"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if verb == "run" and act.get("forever"):
    signal.signal(signal.SIGTERM, stop)

say(f"stdin {len(sys.stdin.read())} bytes")
say(f"{verb} of {settings['run']} in {Path.cwd()}")
if "read" in act:
    say(f"read {len(Path(act['read']).read_bytes())} bytes")
if "tell" in act:
    # in two writes: a secret may come in pieces
    told = os.environ.get(act["tell"], "")
    for part in (f"told {told[:5]}", f"{told[5:]} and {told}\n"):
        sys.stdout.write(part)
        sys.stdout.flush()
if act.get("grandchild"):
    say(f"grandchild is {leave_grandchild(60)}")

if "fill" in act:
    filler = Path(act["fill"])
    try:
        with filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"f" * 65536)
    finally:
        if act.get("tidy"):
            filler.unlink()

if act.get("hold"):
    say("holding")
    while not Path(act["hold"]).exists():
        time.sleep(0.02)

if "refused" in act and verb != "check":
    if act["refused"] is not None:
        write("refused.json", act["refused"])
    say(f"no such shard: {os.environ.get(act.get('tell', ''), 'shard 3')}")
    sys.exit(2)
if verb == "check":
    if act.get("crash"):
        raise RuntimeError("check crashed")
    write(
        "check.json",
        {
            "contract": 1,
            "outcome": act.get("check", "ok"),
            "problems": [],
            "prepare": act.get("needs"),
            "settings": settings,
            "environment": seen,
            "uid": os.getuid(),
        },
    )
    sys.exit(0 if act.get("check", "ok") == "ok" else 2)
if verb == "prepare":
    say(f"found {sorted(path.name for path in out.iterdir())}")
    write("data.json", [1, 2, 3])
    if act.get("half"):
        sys.exit(1)
    if act.get("lazy"):
        sys.exit(0)
    if act.get("hang"):
        say_forever()
    if "once" in act and not Path(act["once"]).exists():
        # only the first time
        Path(act["once"]).touch()
        sys.exit(1)
    if act.get("until"):
        say("half of it")
        while not Path(act["until"]).exists():
            time.sleep(0.02)
    write("prepare.json", {"rows": 3})
if verb == "tune":
    if act.get("hang"):
        say_forever()
    if "fastest" in act:
        table = {"contract": 1, "key": "ab" * 8, "shapes": {"threads": 2}, "strategies": [], "fastest": act["fastest"]}
        write("tuning.json", table)
        kept = Path(settings["cache"]) / "tuning" / f"{table['key']}.json"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(table))
    sys.exit(act.get("exit", 0))
if verb == "canary":
    if act.get("hang"):
        say_forever()
    if act.get("edit"):
        edited = Path(act["edit"])
        edited.chmod(0o644)
        with edited.open("a") as file:
            file.write("# changed")
    before = Path(settings["cache"]) / "canaries"
    number = int(before.read_text()) + 1 if before.exists() else 1
    before.write_text(str(number))
    if number <= act.get("broken", 0):
        told = {"outcome": "inconclusive", "summary": "a control broke", "again": "it broke", **act.get("told", {})}
        write("evidence.json", {"contract": 1, "checks": [], **told})
        if "crash" in act:
            os.kill(os.getpid(), act["crash"])
        sys.exit(act.get("code", 7))
    if "evidence" in act:
        write("evidence.json", {"contract": 1, "outcome": act["evidence"], "summary": "as told", "checks": []})
    if "signal" in act:
        os.kill(os.getpid(), act["signal"])
    sys.exit(act.get("exit", 0))
if verb == "run":
    for number in range(act.get("lines", 0)):
        print(f"line {number:07d} {'x' * 80}", flush=number % 100 == 0)
    print(act.get("rest", ""), end="", flush=True)
    if "mark" in act:
        Path(act["mark"]).touch()
    if "crashes" in act:
        say(f"from {settings['training'].get('resume_from')}")
    counter = Path(settings["cache"]) / "crashes"
    crashes = int(counter.read_text()) if counter.exists() else 0
    if crashes < act.get("crashes", 0):
        counter.write_text(str(crashes + 1))
        if act.get("saves", True):
            checkpoint(crashes + 1)
        sys.exit(act.get("code", 1))
    if "records" in act:
        # a library, or a trainer that is hung, may print for ever; only records are steps
        with (out / "metrics.ndjson").open("a") as metrics:
            metrics.writelines(act["records"])
    if "eat" in act:
        hoard = []
        while len(hoard) < act["eat"]:
            hoard.append(bytearray(os.urandom(1024)) * 1024)
    if act.get("stubborn") or act.get("forever"):
        say("ready")
        say_forever()
    with (out / "metrics.ndjson").open("a") as metrics:
        for step in range(act.get("steps", 3)):
            metrics.write(json.dumps({"v": 1, "kind": "step", "step": step, "loss": 1.0, "time": time.time()}) + "\n")
            metrics.flush()
            say(f"step {step}")
            time.sleep(act.get("pause", 0))
        metrics.write(json.dumps({"v": 1, "kind": "evaluation", "step": step}) + "\n")
    checkpoint(3)
    write("result.json", {"contract": 1, "outcome": "completed"})
    if "signal" in act:
        os.kill(os.getpid(), act["signal"])
    sys.exit(act.get("exit", 0))
