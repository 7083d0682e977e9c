"""A run that survives: killed at any instant and resumed, it ends as if nothing had happened; files that are damaged,
foreign or malicious are refused in one line; a write that fails loses nothing."""

import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import ROOT
from test_script import SMALL, finished, run, scalars

import spirl_rainbow as spirl

TINY = [*SMALL, "--total-timesteps", "200", "--checkpoint-frequency", "20", "--eval-frequency", "90"]


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
    curves = [{tag: points for tag, points in scalars(path).items() if tag != "charts/steps_per_second"}
              for path in (one, two)]
    assert curves[0] == curves[1]  # no step twice, no gap
    assert all(len({step for step, _ in points}) == len(points) for points in curves[1].values())
    assert not (two / "checkpoint.pt").exists() and not list(two.glob(".*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never stopped, with pre-training and evaluations on the way, and how long it took."""
    folder = tmp_path_factory.mktemp("whole")
    began = time.monotonic()
    path, _ = finished(folder, "whole", *TINY)
    return path, time.monotonic() - began


def test_killed_at_any_instant(tmp_path, whole, request):
    """kill -9 at random instants of the whole run, one a run; `--kills 20` for more."""
    path, duration = whole
    rng, kills = random.Random(), request.config.getoption("--kills")
    instants = [rng.uniform(i, i + 1) / kills * duration for i in range(kills)]  # one in each part of the run

    def survive(kill):
        number, instant = kill
        process = start(tmp_path, "spirl_rainbow.py", *TINY, "--run-name", f"kill{number}")
        time.sleep(instant)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        folder = tmp_path / "runs" / f"kill{number}"
        if not (folder / "args.json").exists() or (folder / "results.json").exists():
            return "before or after the run"
        content = {}
        if (folder / "checkpoint.pt").exists():
            content = torch.load(folder / "checkpoint.pt", weights_only=True)
        done = run(tmp_path, "--resume", f"{folder}/")
        assert done.returncode == 0, (instant, content.keys(), done.stderr[-2000:])
        if "training" in content:  # it did not begin anew
            assert f"going on from step {content['training']['counters'][0]}" in done.stdout
        same_end(path, folder)
        return "training" if "training" in content else "pre-training" if content else "no checkpoint yet"

    with ThreadPoolExecutor(2) as pool:
        reached = list(pool.map(survive, enumerate(instants)))
    print("killed at", [round(instant, 1) for instant in instants], "in", reached)


@pytest.mark.parametrize("script, number, flags", [
    ("spirl_mae.py", signal.SIGTERM, [*SMALL[: SMALL.index("--max-episode-frames")], "--mae-epochs", "6", "--threads",
                                      "1", "--device", "cpu"]),
    ("spirl_baselines.py", signal.SIGINT, [*SMALL[SMALL.index("--max-episode-frames") :], "--total-timesteps", "400",
                                           "--checkpoint-frequency", "0"]),
])
def test_stopped_by_a_signal(tmp_path, script, number, flags):
    with ThreadPoolExecutor(1) as pool:
        never = pool.submit(finished, tmp_path, "never", *flags, script=script)
        process = start(tmp_path, script, *flags, "--run-name", "stopped")
        for line in iter(lambda: process.stderr.read(80), ""):  # until its loop has begun
            if "pre-training:" in line or "training:" in line:
                time.sleep(1)
                break
        process.send_signal(number)
        process.communicate()
        assert process.returncode == 128 + number
        never.result()
    folder = tmp_path / "runs/stopped"
    assert (folder / "checkpoint.pt").exists() and not (folder / "results.json").exists()
    done = run(tmp_path, "--resume", "runs/stopped", script=script)
    assert done.returncode == 0, done.stderr[-2000:]
    same_end(tmp_path / "runs/never", folder)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run in the middle of its training: a folder with a checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    process = start(folder, "spirl_rainbow.py", *TINY, "--run-name", "run")
    path = folder / "runs/run"
    times = [0, 0]
    while process.poll() is None and not 0 < times[0] < times[1]:  # a checkpoint that is younger than the counted MAE
        time.sleep(0.05)
        times = [path.stat().st_mtime_ns if path.exists() else 0 for path in (path / "mae.pt", path / "checkpoint.pt")]
    time.sleep(1)
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
    for tenth in range(10):
        path.write_bytes(whole[: len(whole) * tenth // 10])
        refused(capsys, path)
        with zipfile.ZipFile(stopped / "checkpoint.pt") as file:  # a byte of a tensor or of the pickle, not of padding
            inside = max((info for info in file.infolist() if info.header_offset <= len(whole) * (tenth + 0.5) / 10),
                         key=lambda info: info.header_offset)
            at = whole.index(file.read(inside), inside.header_offset) + inside.file_size // 2
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


def test_resume_refuses_what_it_cannot_go_on_with(tmp_path, stopped, whole):
    changed = {}
    content = torch.load(stopped / "checkpoint.pt", weights_only=True)
    args, versions = content["args"], content["versions"]
    for name, change in (("foreign", {"script": "spirl_baselines"}),
                         ("older", {"versions": versions | {"torch": "2.5.0"}}),
                         ("game", {"args": args | {"env_id": "ALE/Seaquest-v5"}}),
                         ("size", {"args": args | {"buffer_size": 999}}), ("device", {"device_type": "cuda"})):
        changed[name] = tmp_path / name
        changed[name].mkdir()
        (changed[name] / "args.json").write_text((stopped / "args.json").read_text())
        torch.save(content | change, changed[name] / "checkpoint.pt")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/args.json").write_text('{"seed": 1')
    (tmp_path / "args").mkdir()
    (tmp_path / "args/args.json").write_text("{}")
    table = [
        (["--resume", stopped, "--seed", "2"], "--resume stands alone"),
        (["--resume", tmp_path / "nowhere"], "is not the folder of a run"),
        (["--resume", whole[0]], "is a finished run"),
        (["--resume", tmp_path / "args"], "is a run of another script or version"),
        (["--resume", changed["foreign"]], "has script spirl_baselines, and this is spirl_rainbow"),
        (["--resume", changed["older"]], "has torch 2.5.0, and this is"),
        (["--resume", changed["game"]], "has env_id ALE/Seaquest-v5, and this is ALE/Frostbite-v5"),
        (["--resume", changed["size"]], "has buffer_size 999, and this is 150"),
        (["--resume", changed["device"]], "has device_type cuda, and this is cpu"),
        (["--resume", tmp_path / "broken"], "its args.json is damaged"),
    ]
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with ThreadPoolExecutor(2) as pool:
        for (_, message), done in zip(table, pool.map(lambda row: run(tmp_path, *row[0]), table), strict=True):
            assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr, done.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    done = run(tmp_path, "--resume", stopped, script="spirl_baselines.py")
    assert done.returncode == 2 and "is a run of another script or version" in done.stderr


def test_a_failed_write_leaves_the_earlier_file(tmp_path):
    """A real failure half way, from the limit on a file's size that the system sets."""
    path = tmp_path / "some/file.pt"  # its folder is made
    spirl.write_whole(path, lambda temporary: torch.save(torch.zeros(10), temporary))
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="file.pt cannot be written .*make room"):
            spirl.write_whole(path, lambda temporary: torch.save(torch.zeros(100_000), temporary))
        with pytest.raises(OSError, match="cannot be written"):
            spirl.write_json(tmp_path / "some.json", ["x" * 200_000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and sorted(file.name for file in tmp_path.rglob("*")) == ["file.pt", "some"]


def test_a_run_on_a_full_disk(tmp_path):
    """mae.pt is a result: the run ends with one line. A checkpoint is not: it goes on, with a warning."""

    def fill(limit, what):
        command = [sys.executable, ROOT / "spirl_rainbow.py", *map(str, TINY), "--run-name", what]
        limits = limit, resource.RLIM_INFINITY
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
        assert f"{what} cannot be written" in done.stderr and "Traceback" not in done.stderr
        return done.returncode

    with ThreadPoolExecutor(2) as pool:
        statuses = list(pool.map(fill, (60_000, 10_000_000), ("mae.pt", "checkpoint.pt")))
    assert statuses == [1, 0] and (tmp_path / "runs/checkpoint.pt/results.json").exists()
    done = run(tmp_path, "--resume", "runs/mae.pt")  # with room again
    assert done.returncode == 0 and (tmp_path / "runs/mae.pt/results.json").exists()


def test_the_replay_must_fit(tmp_path):
    for script, flags in (("spirl_rainbow.py", []), ("spirl_baselines.py", [])):
        done = run(tmp_path, *flags, "--buffer-size", 2_000_000_000, "--device", "cpu", script=script)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "--buffer-size: the replay needs" in done.stderr and "GB free; give a smaller" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_game_that_does_not_come_back_is_an_error(tmp_path, stopped):
    folder = tmp_path / "changed"
    folder.mkdir()
    for name in ("args.json", "mae.pt"):
        (folder / name).write_bytes((stopped / name).read_bytes())
    content = torch.load(stopped / "checkpoint.pt", weights_only=True)
    content["training"]["observation"] += 1  # as if the emulator drew another picture
    torch.save(content, folder / "checkpoint.pt")
    done = run(tmp_path, "--resume", folder)
    assert done.returncode == 1 and "the game does not come back to where it was" in done.stderr
    assert "Traceback" not in done.stderr and os.path.exists(folder / "checkpoint.pt")
