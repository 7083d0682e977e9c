"""A run that survives: killed at any instant and resumed, it ends as if nothing had happened; files that are damaged,
foreign or malicious are refused in one line; a write that fails loses nothing."""

import argparse
import errno
import fcntl
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from test_script import SMALL, finished, refusal, run, run_here, scalars

import spirl_rainbow as spirl

# Short games and few of them: an evaluation is soon over.
TINY = [*SMALL, "--mae-epochs", "3", "--total-timesteps", "170", "--checkpoint-frequency", "20",
        "--eval-frequency", "90", "--max-episode-frames", "240", "--eval-episodes", "1"]
PIXELS = ["--max-episode-frames", "240", "--learning-starts", "120", "--buffer-size", "150", "--eval-episodes", "1",
          "--total-timesteps", "200", "--checkpoint-frequency", "0", "--threads", "1", "--device", "cpu"]
RUNS = {  # each script; de-rainbow-p is de-rainbow after more random steps
    "spirl": ["spirl_rainbow.py", *TINY, "--error-cache-size", "65536"],  # a small checkpoint
    "mae": ["spirl_mae.py", *SMALL[: SMALL.index("--max-episode-frames")], "--mae-epochs", "6",
            "--threads", str(min(2, os.cpu_count())), "--device", "cpu"],
    "de-rainbow-p": ["spirl_baselines.py", "--method", "de-rainbow-p", "--mae-frames", "150", *PIXELS],
    "mae-all": ["spirl_baselines.py", "--method", "mae-all", *TINY],
}


def start(folder, script, *flags):
    return subprocess.Popen([sys.executable, ROOT / script, *map(str, flags)], cwd=folder, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def same_end(one, two):
    """Two run folders hold the same weights, scores and curves, bit for bit."""
    for name in ("mae.pt", "agent.pt"):
        if (one / name).exists() or (two / name).exists():
            models = [torch.load(path / name, weights_only=True)["model"] for path in (one, two)]
            assert models[0].keys() == models[1].keys()
            assert all(torch.equal(models[0][key], models[1][key]) for key in models[0]), name
    results = [json.loads((path / "results.json").read_text()) for path in (one, two)]
    for name in ("scores", "evaluations", "training_scores", "updates", "games", "misses_per_frame", "K",
                 "held_out_losses", "final_loss"):
        assert results[0].get(name) == results[1].get(name), name
    curves = [scalars(path) for path in (one, two)]
    for tag in curves[0] | curves[1]:  # no step twice, no gap
        timed = tag == "charts/steps_per_second"
        points = [[point[:1] if timed else point for point in curve[tag]] for curve in curves]
        assert points[0] == points[1] and len({point[0] for point in points[0]}) == len(points[0]), tag
    assert not (two / "checkpoint.pt").exists() and not list(two.rglob(".*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """whole(name): the folder of a run of RUNS that was never stopped."""
    folder, done = tmp_path_factory.mktemp("whole"), {}

    def run_once(name):
        if name not in done:
            script, *flags = RUNS[name]
            done[name] = finished(folder, name, *flags, script=script)[0]
        return done[name]

    return run_once


def wait_for(process, pattern):
    """Read what a process says until it says something that matches, or ends."""
    text = ""
    for character in iter(lambda: process.stderr.read(1), ""):
        text += character
        if re.search(pattern, text):
            return


def test_killed_at_any_instant(tmp_path, whole, request):
    """kill -9 at random instants; `--kills 20` for more. Each run is killed once or, every other one, twice.

    One run in five is killed at any instant since it began, when there may be nothing yet to go on from; the others
    at any instant since their first checkpoint, spread over all that they do after it.
    """
    path, kills, seed = whole("spirl"), request.config.getoption("--kills"), random.randrange(10**6)
    seconds = json.loads((path / "results.json").read_text())["seconds"]
    all_of_it = sum(seconds.values())
    after_the_first = all_of_it - seconds["collect"] - seconds["pretrain"] / 3  # the first of three epochs
    rng = random.Random(seed)
    instants = [("args.json", rng.uniform(0, all_of_it)) if i % 5 == 0 else
                ("checkpoint.pt", rng.uniform(i - 1, i) / (kills - 1) * after_the_first) for i in range(kills)]
    print(f"seed {seed}: kills after", [f"{instant:.1f} s since {file}" for file, instant in instants])

    def kill(folder, process, begun, instant):
        """Kill it so long after `begun()`; what it had reached is what its checkpoint, always a sound one, is of."""
        while process.poll() is None and not begun():
            time.sleep(0.01)
        time.sleep(instant)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if not (folder / "checkpoint.pt").exists():
            return "the run begins anew"
        content = torch.load(folder / "checkpoint.pt", weights_only=True)
        if "training" in content:
            return f"going on from step {content['training']['counters'][0]}\n"
        return f"going on from step {content['pretraining']['step']} of pre-training\n"

    def survive(number, sooner=1.0):
        file, instant = instants[number]
        folder = tmp_path / "runs" / f"kill{number}"
        process = start(tmp_path, *RUNS["spirl"], "--run-name", folder.name)
        told = [kill(folder, process, (folder / file).exists, sooner * instant)]
        if number % 2 and not (folder / "results.json").exists():
            events = set(folder.glob("events.*"))
            process = start(tmp_path, RUNS["spirl"][0], "--resume", folder)  # it begins a new file of curves
            told.append(kill(folder, process, lambda: set(folder.glob("events.*")) - events,
                             sooner * random.Random(seed + number).uniform(0, after_the_first / 2)))
        if (folder / "results.json").exists():  # this one was faster than the first: once more, a little earlier
            shutil.rmtree(folder)
            return survive(number, 0.9 * sooner)
        done = run(tmp_path, "--resume", f"{folder}/")
        assert done.returncode == 0 and told[-1] in done.stdout, (told, done.stdout, done.stderr[-2000:])
        same_end(path, folder)
        return told

    with ThreadPoolExecutor(2) as pool:
        reached = list(pool.map(survive, range(kills)))
    print(f"{sum(map(len, reached))} kills; what each resume then said:", reached)
    assert kills < 5 or any(told[-1].startswith("going on from step") and "pre-" not in told[-1] for told in reached)


WRITES = """
import os, runpy, signal, sys

moment, left, script, *sys.argv[1:] = sys.argv[1:]
left = int(left)


def deadly(call, name, before):
    def wrapped(*args, **more):
        global left
        if not str(args[1]).endswith("checkpoint.pt"):
            return call(*args, **more)
        left -= 1
        if left:
            return call(*args, **more)
        if not before:
            call(*args, **more)
        if name == "save":
            os.truncate(args[1], os.path.getsize(args[1]) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    return wrapped


if moment == "half written":
    import torch

    torch.save = deadly(torch.save, "save", before=False)
else:
    os.replace = deadly(os.replace, "replace", before=moment == "not yet renamed")
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""


def test_killed_while_a_checkpoint_is_written(tmp_path, whole):
    """With half of it on the disk, all of it but not under its name, or just renamed: the earlier one or this one."""

    def survive(case):
        moment, writes = case
        folder = tmp_path / "runs" / moment.replace(" ", "-")
        script, *flags = RUNS["spirl"]
        command = [sys.executable, "-c", WRITES, moment, writes, ROOT / script, *flags, "--run-name", folder.name]
        killed = subprocess.run([str(part) for part in command], cwd=tmp_path, capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
        assert len(list(folder.glob(".*.checkpoint.pt"))) == (moment != "just renamed")
        content = torch.load(folder / "checkpoint.pt", weights_only=True)
        done = run(tmp_path, "--resume", folder)
        assert done.returncode == 0, done.stderr[-2000:]
        same_end(whole("spirl"), folder)
        return content["training"]["counters"][0]

    whole("spirl")
    # A run writes one for each of 3 epochs, then at steps 0, 20, 40, 60, 80, 90 (before an evaluation), 100 and so on.
    with ThreadPoolExecutor(2) as pool:
        steps = list(pool.map(survive, (("half written", 10), ("not yet renamed", 7), ("just renamed", 8))))
    assert steps == [90, 40, 80]


def test_stopped_by_a_signal(tmp_path, whole):
    """The step in progress is finished and saved; the run goes on later, and a finished one leaves no checkpoint."""

    def stop_and_go_on(name, number):
        script, *flags = RUNS[name]
        process = start(tmp_path, script, *flags, "--run-name", name)
        wait_for(process, "pre-training: .*[1-9]/" if name == "mae" else "(?<!pre-)training: .*1[2-9][0-9]/")
        process.send_signal(number)
        _, err = process.communicate()
        assert process.returncode == 128 + number and f"stopped; go on with --resume runs/{name}\n" in err, err
        folder = tmp_path / "runs" / name
        assert (folder / "checkpoint.pt").exists() and not (folder / "results.json").exists()
        if name == "de-rainbow-p" and Path("/dev/full").exists():  # its log is on a full disk: that ends no run
            with open("/dev/full", "w") as full:
                done = subprocess.run([sys.executable, ROOT / script, "--resume", f"runs/{name}"], cwd=tmp_path,
                                      stdout=full, stderr=full)
        else:
            done = run(tmp_path, "--resume", f"runs/{name}", script=script)
        assert done.returncode == 0, done.stderr
        same_end(whole(name), folder)

    with ThreadPoolExecutor(2) as pool:
        numbers = {"mae": signal.SIGTERM, "de-rainbow-p": signal.SIGINT, "mae-all": signal.SIGTERM}
        list(pool.map(stop_and_go_on, numbers, numbers.values()))


def test_a_second_signal_does_not_wait():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signals = spirl.Signals()
        with pytest.raises(SystemExit, match="130"):
            signal.raise_signal(signal.SIGINT)  # nothing has begun that should be finished first
        signals.at_once, signals.number = False, 0
        signal.raise_signal(signal.SIGTERM)
        assert signals.number == signal.SIGTERM
        with pytest.raises(SystemExit, match="143"):
            signals.stop_at_once()  # that one waited
        signals.at_once = False
        with pytest.raises(SystemExit, match="130"):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run in the middle of its training: a folder with a checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    process = start(folder, *RUNS["spirl"], "--run-name", "run")
    path = folder / "runs/run"
    wait_for(process, "(?<!pre-)training: .*1[2-9][0-9]/")
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    return path


class Malicious:
    def __reduce__(self):
        return open, ("i-was-here", "w")


def refused(capsys, path):
    with pytest.raises(SystemExit) as stop:
        spirl.read_checkpoint(path, "--resume")
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.startswith(f"error: --resume {path}") and err.count("\n") == 1, err


def test_damaged_checkpoints_are_refused(tmp_path, stopped, capsys, monkeypatch):
    """Cut at each tenth, a byte flipped in each tenth, empty, and with code in it: which is never run."""
    whole, path = (stopped / "checkpoint.pt").read_bytes(), tmp_path / "checkpoint.pt"
    with zipfile.ZipFile(stopped / "checkpoint.pt") as file:  # where tensors and the pickle are, padding left out
        contents = [(whole.index(file.read(info), info.header_offset), info.file_size) for info in file.infolist()]
        contents = [(start, start + size) for start, size in contents if size]
    for tenth in range(10):
        path.write_bytes(whole[: len(whole) * tenth // 10])
        refused(capsys, path)
        at = len(whole) * (2 * tenth + 1) // 20
        if not any(start <= at < end for start, end in contents):  # between two: the next one's first byte
            at = min(start for start, _ in contents if start > at)
        flipped = bytearray(whole)
        flipped[at] ^= 0x10
        path.write_bytes(flipped)
        refused(capsys, path)
    monkeypatch.chdir(tmp_path)
    torch.save({"script": "spirl_rainbow", "online": Malicious()}, path)
    refused(capsys, path)
    path.write_bytes(pickle.dumps(Malicious()))
    refused(capsys, path)
    torch.save([1, 2], path)
    refused(capsys, path)
    assert not (tmp_path / "i-was-here").exists()
    path.write_bytes(whole)
    assert spirl.read_checkpoint(path, "--resume")["script"] == "spirl_rainbow"


def test_resume_refuses_what_it_cannot_go_on_with(tmp_path, stopped, whole, monkeypatch, capsys):
    changed = {}
    content = torch.load(stopped / "checkpoint.pt", weights_only=True)
    args, versions = content["args"], content["versions"]
    for name, change in (("foreign", {"script": "spirl_baselines"}),
                         ("older", {"versions": versions | {"torch": "2.5.0"}}),
                         ("game", {"args": args | {"env_id": "ALE/Seaquest-v5"}}),
                         ("size", {"args": args | {"buffer_size": 999}}), ("device", {"device_type": "cuda"}),
                         ("authors", {"args": argparse.Namespace(), "script": None})):
        changed[name] = tmp_path / name
        changed[name].mkdir()
        (changed[name] / "args.json").write_text((stopped / "args.json").read_text())
        torch.save(content | change, changed[name] / "checkpoint.pt")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/args.json").write_text('{"seed": 1')
    (tmp_path / "type").mkdir()
    text = (stopped / "args.json").read_text()
    (tmp_path / "type/args.json").write_text(text.replace('"threads": 1', '"threads": "x"'))
    for name, value in (("mae_checkpoint", 5), ("seed", None), ("padding", "ones"), ("max_ratio", [0.5])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.json").write_text(json.dumps(json.loads(text) | {name: value}))
    (tmp_path / "args").mkdir()
    (tmp_path / "args/args.json").write_text("{}")
    for folder, message in (
        (tmp_path / "nowhere", "is not the folder of a run"),
        (whole("spirl"), "is a finished run"),
        (tmp_path / "args", "is a run of another script or version"),
        (changed["foreign"], "has script spirl_baselines, and this is spirl_rainbow"),
        (changed["older"], "has torch 2.5.0, and this is"),
        (changed["game"], "has env_id ALE/Seaquest-v5, and this is ALE/Frostbite-v5"),
        (changed["size"], "has buffer_size 999, and this is 150"),
        (changed["device"], "has device_type cuda, and this is cpu"),
        (changed["authors"], "has script None, and this is spirl_rainbow"),
        (tmp_path / "broken", "its args.json is damaged"),
        (tmp_path / "type", "its args.json is damaged (threads is 'x')"),
        (tmp_path / "mae_checkpoint", "its args.json is damaged (mae_checkpoint is 5)"),
        (tmp_path / "seed", "its args.json is damaged (seed is None)"),
        (tmp_path / "padding", "its args.json is damaged (padding is 'ones')"),
        (tmp_path / "max_ratio", "its args.json is damaged (max_ratio is [0.5])"),
    ):
        assert message in refusal(tmp_path, monkeypatch, capsys, "--resume", folder)
    for script in ("spirl_baselines.py", "spirl_mae.py"):
        message = "is a run of another script or version"
        assert message in refusal(tmp_path, monkeypatch, capsys, "--resume", stopped, script=script)
    assert "--resume stands alone" in refusal(tmp_path, monkeypatch, capsys, "--resume", stopped, "--seed", "2")
    with spirl.lock_run(stopped):
        message = "is a run that is going on in another process"
        assert message in refusal(tmp_path, monkeypatch, capsys, "--resume", stopped)


def test_another_cpu_or_number_of_threads_is_a_warning(tmp_path, stopped, capsys):
    content = torch.load(stopped / "checkpoint.pt", weights_only=True)
    assert content["cpu_settings"]["CPU threads"] == 1  # of that run
    args, device = spirl.Args(**{**content["args"], "resume": stopped}), torch.device("cpu")
    assert torch.get_num_threads() == 1
    spirl.load_checkpoint(stopped, args, device)
    assert capsys.readouterr().err == ""
    content["cpu_settings"] = {"CPU threads": 7, "CPU": "abacus"}
    torch.save(content, tmp_path / "checkpoint.pt")
    assert spirl.load_checkpoint(tmp_path, args, device)["cpu_settings"]["CPU threads"] == 7
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: CPU threads: 7 when the run stopped, 1 now; it goes on, but not bit for bit")
    assert second.startswith("warning: CPU: abacus when the run stopped, ")


def test_a_new_run_is_there_with_its_arguments_or_not_at_all(tmp_path, monkeypatch, capsys):
    """No kill can leave a folder that is neither new nor to be resumed; of two runs of one name one is refused."""
    monkeypatch.chdir(tmp_path)
    seen = []
    for name in ("mkdir", "open", "rename", "replace"):
        def look(*args, call=getattr(os, name), **more):
            seen.append(not Path("runs/it").exists() or Path("runs/it/args.json").exists())
            return call(*args, **more)

        monkeypatch.setattr(os, name, look)
    lock = spirl.new_run(Path("runs/it"), spirl.Args(seed=7))
    assert len(seen) > 4 and all(seen) and json.loads(Path("runs/it/args.json").read_text())["seed"] == 7
    assert [path.name for path in Path("runs").iterdir()] == ["it"]
    with pytest.raises(SystemExit, match="2"):
        spirl.new_run(Path("runs/it"), spirl.Args(seed=8))
    assert "error: --run-name: the new folder runs/it cannot be made (Directory not empty)" in capsys.readouterr().err
    assert [path.name for path in Path("runs").iterdir()] == ["it"]
    assert json.loads(Path("runs/it/args.json").read_text())["seed"] == 7
    with pytest.raises(SystemExit, match="2"):
        spirl.lock_run(Path("runs/it"))  # the lock came with it
    lock.close()
    spirl.lock_run(Path("runs/it")).close()


def test_what_is_the_disks_fault_and_what_is_not(tmp_path):
    path = tmp_path / "runs/agent.pt"

    def save_without_a_folder(temporary):
        temporary.parent.rmdir()
        torch.save(torch.zeros(10), temporary)

    with pytest.raises(OSError, match="agent.pt cannot be written .*give it back its folder"):
        spirl.write_whole(path, save_without_a_folder)

    def save_what_is_lost(temporary):
        temporary.write_text("half")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="^CUDA error"):
        spirl.write_whole(path, save_what_is_lost)
    assert not list(path.parent.iterdir())


def test_a_failed_write_leaves_the_earlier_file(tmp_path):
    """A real failure half way, from the limit on a file's size that the system sets."""
    path = tmp_path / "some/file.pt"  # its folder is made
    spirl.write_whole(path, lambda temporary: torch.save(torch.zeros(10), temporary))
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    torch.save(torch.zeros(100_000), tmp_path / "large.pt")
    size = (tmp_path / "large.pt").stat().st_size
    (tmp_path / "large.pt").unlink()
    try:
        for room in (100_000, size - 100):  # half way, and at the last bytes
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
            with pytest.raises(OSError, match="file.pt cannot be written .*make room"):
                spirl.write_whole(path, lambda temporary: torch.save(torch.zeros(100_000), temporary))
        with pytest.raises(OSError, match="cannot be written"):
            spirl.write_json(tmp_path / "some.json", ["x" * 500_000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and sorted(file.name for file in tmp_path.rglob("*")) == ["file.pt", "some"]


def test_a_run_on_a_full_disk(tmp_path):
    """A warning, and the run goes on. Where a result still cannot be written at its end, that is one line."""

    def fill(limit, what):
        script, *flags = RUNS["spirl"]
        command = [sys.executable, ROOT / script, *flags, "--run-name", what]
        limits = limit, resource.RLIM_INFINITY
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
        assert f"{what} cannot be written" in done.stderr and "Traceback" not in done.stderr
        return done.returncode

    with ThreadPoolExecutor(2) as pool:
        statuses = list(pool.map(fill, (60_000, 4_000_000), ("mae.pt", "checkpoint.pt")))
    assert statuses == [1, 0] and (tmp_path / "runs/checkpoint.pt/results.json").exists()


@pytest.mark.parametrize("name, more, files", [
    ("spirl", ["--capture-video"], ["agent.pt", "policy_attention.png", "policy.gif", "results.json"]),
    ("mae", [], ["mae.pt", "mae_reconstruction.png", "salient_selection.png", "salient_patches.png", "max_ratio.png",
                 "loss.png", "results.json"]),
    ("de-rainbow-p", [], ["agent.pt", "results.json"]),
])
def test_a_write_that_fails_at_any_file(tmp_path, whole, monkeypatch, capsys, name, more, files):
    """The disk is full as a file is to get its name: one error; with room again the run goes on, to the same end."""
    script, *flags = RUNS[name]
    full, rename, for_a_while = "args.json", os.replace, ["mae.pt", "checkpoint.pt"] * 2

    def replace(source, target):
        if Path(target).name in for_a_while:
            for_a_while.remove(Path(target).name)
            raise OSError(errno.ENOSPC, "No space left on device")
        if Path(target).name == full:
            os.truncate(source, os.path.getsize(source) // 2)
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target)

    def fails(*flags):
        with pytest.raises(OSError, match=f"{full} cannot be written .*No space left on device.*; make room"):
            run_here(tmp_path, monkeypatch, *flags, script=script)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(fcntl, "flock", lambda *lock: None)  # this process outlives its failed runs and their locks
    with pytest.raises(SystemExit, match="2"):
        run_here(tmp_path, monkeypatch, *flags, *more, "--run-name", "it", script=script)
    err = capsys.readouterr().err
    assert err.startswith("error: --run-name: the new folder runs/it cannot be made (No space left on device); give")
    assert err.count("\n") == 1 and not list((tmp_path / "runs").iterdir())
    for full in files:
        fails(*(["--resume", "runs/it"] if (tmp_path / "runs/it").exists() else [*flags, *more, "--run-name", "it"]))
    err = capsys.readouterr().err
    assert re.search("checkpoint.pt cannot be written .*No space left on device.*; make room for it or give it", err)
    assert "an earlier checkpoint, if there is one, stands" in err
    assert name == "de-rainbow-p" or re.search("mae.pt cannot be written .*; the run goes on, and tries again", err)
    full = None
    run_here(tmp_path, monkeypatch, "--resume", "runs/it", script=script)
    same_end(whole(name), tmp_path / "runs/it")


def test_a_folder_that_is_removed_comes_back(tmp_path, whole):
    """With the next checkpoint: what a resume needs is in it again, and the run ends as any other."""
    process = start(tmp_path, *RUNS["spirl"], "--run-name", "gone")
    wait_for(process, "(?<!pre-)training: .*1[2-9][0-9]/")
    path, err = tmp_path / "runs/gone", ""
    while path.exists():
        shutil.rmtree(path, ignore_errors=True)
    _, err = process.communicate()
    assert process.returncode == 0 and "args.json is not there; it is written again" in err, err
    assert "Traceback" not in err, err
    for name in ("args.json", "mae.pt", "agent.pt", "results.json"):
        assert (path / name).exists(), name
    weights = [torch.load(folder / "agent.pt", weights_only=True)["model"] for folder in (path, whole("spirl"))]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert scalars(path)["eval/mean"]  # what came after


def test_curves_survive_a_full_disk(tmp_path, capsys, monkeypatch):
    """A real limit on a file's size: a gap in the curves, one warning, and a new file when there is room."""
    monkeypatch.setattr(threading, "excepthook", lambda failed: None)  # as the scripts have it for OSError
    curves = spirl.Curves(tmp_path)
    curves.add_scalar("x", 1.0, 1)
    curves.flush()
    size, limits = next(tmp_path.iterdir()).stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        for step in (2, 3):
            curves.add_scalar("x", float(step), step)
        time.sleep(0.5)
        curves.add_scalar("x", 4.0, 4)
        curves.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "warning: TensorBoard's curves cannot be written" in capsys.readouterr().err
    curves.flush()
    curves.add_scalar("x", 5.0, 5)
    curves.flush()
    points = scalars(tmp_path)["x"]
    assert points[0] == (1, 1.0) and points[-1] == (5, 5.0)
    assert capsys.readouterr().err == ""


def test_a_run_that_diverges_leaves_a_sound_checkpoint(tmp_path, monkeypatch):
    script, *flags = RUNS["spirl"]
    with pytest.raises(SystemExit, match="error: the loss or its gradient is not finite at step 12[0-9], ") as stop:
        run_here(tmp_path, monkeypatch, *flags, "--learning-rate", "1e8", "--run-name", "wild", script=script)
    content = torch.load(tmp_path / "runs/wild/checkpoint.pt", weights_only=True)["training"]
    step = int(re.search("at step ([0-9]+)", str(stop.value))[1])
    assert content["counters"][0] == step and content["counters"][4] == step - 121  # all updates but that one
    assert all(value.isfinite().all() for value in content["online"].values())
    assert content["replay"]["priorities"].isfinite().all()


@pytest.mark.parametrize("flags, update, step, stopped_too", [
    (["--train-frequency", "4"], 3, 132, False),  # the next step acts and does not learn
    (["--train-frequency", "4"], 3, 132, True),  # a signal waits
    (["--checkpoint-frequency", "20"], 20, 140, False),  # a checkpoint is due
    ([], 80, 200, False),  # the last: the evaluation is due
])
def test_an_update_that_is_not_finite(tmp_path, monkeypatch, flags, update, step, stopped_too):
    """It ends the run with its step before anything else is done, and a resume goes on without it."""
    flags = ["--method", "de-rainbow", *PIXELS, *flags, "--run-name", "it"]
    clip, norms = torch.nn.utils.clip_grad_norm_, []

    def wrong_once(parameters, limit):
        norms.append(clip(parameters, limit))
        if stopped_too and len(norms) == update:
            signal.raise_signal(signal.SIGTERM)
        return norms[-1] * (math.nan if len(norms) == update else 1)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", wrong_once)
    monkeypatch.setattr(fcntl, "flock", lambda *lock: None)  # this process outlives its failed run and the lock
    with pytest.raises(SystemExit, match=f"error: the loss or its gradient is not finite at step {step}, "):
        run_here(tmp_path, monkeypatch, *flags, script="spirl_baselines.py")
    content = torch.load(tmp_path / "runs/it/checkpoint.pt", weights_only=True)["training"]
    assert content["counters"][0] == step and content["counters"][4] == update - 1 and len(norms) == update
    assert content["optimizer"]["state"][0]["step"] == update - 1 and not content["counters"][6]  # no evaluation yet
    done = run_here(tmp_path, monkeypatch, "--resume", "runs/it", script="spirl_baselines.py")
    total = 20 if "--train-frequency" in flags else 80
    assert done["updates"] == len(norms) - 1 == total - 1 and (tmp_path / "runs/it/results.json").exists()


def test_a_game_that_does_not_come_back_is_an_error(tmp_path, stopped, monkeypatch):
    folder = tmp_path / "changed"
    folder.mkdir()
    for name in ("args.json", "mae.pt"):
        (folder / name).write_bytes((stopped / name).read_bytes())
    content = torch.load(stopped / "checkpoint.pt", weights_only=True)
    content["training"]["observation"] += 1  # as if the emulator drew another picture
    torch.save(content, folder / "checkpoint.pt")
    with pytest.raises(SystemExit, match="the game does not come back to where it was at step"):
        run_here(tmp_path, monkeypatch, "--resume", folder)
    assert (folder / "checkpoint.pt").exists()
