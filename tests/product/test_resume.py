"""A run that survives: killed and resumed, it ends bit for bit as the run that was never stopped."""

import fcntl
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from conftest import PLAY, PRETRAINING, ROOT, SIZES, SMALL, files, finished, in_background, run, run_here, scalars

# Short games and few of them: an evaluation is soon over. There are 105 updates, for each hundredth is logged: weights,
# a target network or an optimizer that do not come back change its losses. (agent.pt may be of an earlier evaluation.)
SHORT = "--total-timesteps 170 --checkpoint-frequency 20 --eval-frequency 90 --eval-episodes 1".split()
SHORT += "--learning-starts 65 --target-update-frequency 7".split()
SPIRL = ["spirl_rainbow.py", *SMALL, *SHORT, "--mae-epochs", "3", "--max-episode-frames", "240"]
DE_RAINBOW_P = "spirl_baselines.py --method de-rainbow-p --env-id ALE/Skiing-v5 --mae-frames 150".split() + PLAY + SHORT
MAE = ["spirl_mae.py", *SIZES, *PRETRAINING, "--mae-epochs", "3", "--mae-mask-spread", "0.2"]


def same_end(one, two):
    """Two run folders hold the same files, weights, scores and curves, bit for bit."""
    assert files(one) == files(two)
    for name in {"mae.pt", "agent.pt"} & files(one):
        models = [torch.load(path / name, weights_only=True)["model"] for path in (one, two)]
        assert all(torch.equal(models[0][key], models[1][key]) for key in models[0]), name
    apart = dict.fromkeys(["args", "training_seconds", "pretraining_seconds"])
    results = [json.loads((path / "results.json").read_text()) | apart for path in (one, two)]
    assert results[0] == results[1]
    for part in {file.parent.relative_to(one) for file in one.rglob("*tfevents*")}:
        curves = [scalars(path / part) for path in (one, two)]
        for curve in curves:
            curve["charts/SPS"] = [(step, "timed") for step, _ in curve.get("charts/SPS", [])]
        assert curves[0] == curves[1]  # no gap, and no step twice:
        assert all(len(dict(points)) == len(points) for points in curves[0].values())


@in_background
def whole(folder):
    """Each script's folder of a run that was never stopped."""
    return {script: finished(folder, script, *flags, script=script)[0] for script, *flags in (SPIRL, DE_RAINBOW_P, MAE)}


KILLER = """
import os, runpy, signal, sys

import torch

where, left, *sys.argv = sys.argv[1:]
left = int(left)
update = where == "an update"  # of the MAE or of the agent; else the name of a file that is not yet renamed
module, name = (torch.nn.utils, "clip_grad_norm_") if update else (os, "replace")
function = getattr(module, name)

def deadly(*args, **more):
    global left
    left -= update or where in str(args[1])
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*args, **more)

setattr(module, name, deadly)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def killed(folder, script_and_flags, *instants):
    """The folder of a run that is killed at each of the instants (where, call) in turn, going on in between."""
    script, *flags = [*script_and_flags, "--run-name", script_and_flags[0]]
    for where, call in instants:
        command = [sys.executable, "-c", KILLER, where, call, ROOT / script, *flags]
        done = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, (where, done.stderr[-2000:])
        flags = ["--resume", f"runs/{script}"]
    return folder / "runs" / script


@in_background
def killed_runs(folder):
    """SPIRL, killed in the second epoch of pre-training, at the end of an evaluation, in a game, and in a checkpoint;
    spirl_mae.py, killed in its second epoch; DE-Rainbow-P, killed in a game: each one's folder, not gone on with."""
    spirl = killed(folder, SPIRL, ("an update", 4), ("agent.pt", 1), ("an update", 70), ("checkpoint.pt", 2))
    mae, baseline = killed(folder, MAE, ("an update", 4)), killed(folder, DE_RAINBOW_P, ("an update", 30))
    return {SPIRL[0]: spirl, MAE[0]: mae, DE_RAINBOW_P[0]: baseline}


@pytest.fixture
def stopped(tmp_path, killed_runs, monkeypatch):
    """stopped(script): a copy of its killed run's folder, and a function that goes on with it."""
    path = tmp_path / "runs/killed"
    go_on = partial(run_here, tmp_path, monkeypatch, "--resume", path)
    return lambda script: (shutil.copytree(killed_runs[script], path), partial(go_on, script=script))


def test_killed_at_chosen_instants(whole, stopped):
    path, go_on = stopped(SPIRL[0])
    checkpoint = torch.load(path / "checkpoint.pt", weights_only=True)
    assert checkpoint["run"]["saved_step"] == 160  # not 170, whose checkpoint was not yet renamed
    known = checkpoint["errors"]
    end = go_on()
    assert end["source_path"] == path / "mae.pt"  # not another
    same_end(whole[SPIRL[0]], path)
    assert known and list(end["error_map"].errors.items())[: len(known)] == list(known.items())  # none computed again


def test_pretraining_alone_goes_on_to_its_end_and_no_further(whole, stopped, refused):
    path, go_on = stopped(MAE[0])
    go_on()
    same_end(whole[MAE[0]], path)
    with refused(f"--resume {path}: this run is finished; give an unfinished one"):
        go_on()


def test_a_baseline_goes_on_only_where_its_game_comes_back(whole, stopped, refused):
    path, go_on = stopped(DE_RAINBOW_P[0])
    content = torch.load(path / "checkpoint.pt", weights_only=True)
    assert content["run"]["saved_step"] == 160  # in the middle of the second game:
    assert len(content["run"]["actions"]) == 60 and content["run"]["score"] < 0
    torch.save({**content, "observation": content["observation"] + 1}, path / "checkpoint.pt")  # another picture
    arguments = json.loads((path / "args.json").read_text())
    for changed in ({"num_atoms": 41}, {"total_timesteps": 155}, {"seed": "1"}):
        (path / "args.json").write_text(json.dumps(arguments | changed))
        with refused(f"--resume {path}: its args.json is not as the run wrote it; put back what was changed$"):
            go_on()
    (path / "args.json").write_text(json.dumps(arguments))
    for message in ("the replayed game differs at step 160", "checkpoint.pt cannot be read as a checkpoint"):
        with refused(f".*{message}", begun=True):
            go_on()
        (path / "checkpoint.pt").write_bytes((path / "checkpoint.pt").read_bytes()[:1000])
    torch.save(content, path / "checkpoint.pt")
    go_on()
    same_end(whole[DE_RAINBOW_P[0]], path)


def test_a_run_begun_on_a_gpu_goes_on_without_one(stopped, capsys, monkeypatch):
    (path, go_on), threads = stopped(DE_RAINBOW_P[0]), []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    content = torch.load(path / "checkpoint.pt", weights_only=True)
    state = torch.arange(16, dtype=torch.uint8)  # seed and offset, 8 bytes each: what a CUDA generator's state is
    content["run"]["seconds"] = 1000.0
    torch.save({**content, "generator": state}, path / "checkpoint.pt")
    end = go_on("--device", "cpu", "--threads", "2")
    out = capsys.readouterr().out
    assert f"--device cpu, --threads 2; writing to {path}; " in out
    assert out.count("note: another kind of device than before: from here the digits differ") == 1
    results = json.loads((path / "results.json").read_text())
    assert results["device"] == "cpu" and results["updates"] == end["run"].updates == 105
    assert results["training_seconds"] > 1000 and threads[0] == 2
    replay = end["replay"]  # the newest frame is what was seen last, pixel by pixel
    assert torch.equal(replay.frames[replay.slot], torch.from_numpy(end["observation"][0, 0]))


def test_a_run_is_gone_on_with_once_at_a_time(stopped, refused):
    """The lock is the system's, on an open file: a killed holder leaves none behind, as the runs above show."""
    path, go_on = stopped(DE_RAINBOW_P[0])
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with (path / "args.json").open() as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with refused(f"--resume {path}: another process is at work on this run; wait for it, or stop it$"):
            go_on()
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


@in_background
def interrupted(folder):
    """What a run prints that gets Ctrl-C in its first game, and its folder once it has gone on to the end."""
    command = [sys.executable, ROOT / DE_RAINBOW_P[0], *DE_RAINBOW_P[1:], "--run-name", "stopped"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    terminal = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background job would ignore Ctrl-C
    process = subprocess.Popen(command, cwd=folder, preexec_fn=terminal, **pipes)
    while process.poll() is None and not (folder / "runs/stopped/checkpoint.pt").exists():
        time.sleep(0.01)
    with (folder / "runs/stopped/args.json").open() as file, pytest.raises(BlockingIOError):  # while it runs
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    process.send_signal(signal.SIGINT)
    err = process.communicate()[1]
    saved_step = torch.load(folder / "runs/stopped/checkpoint.pt", weights_only=True)["run"]["saved_step"]
    done = run(folder, "--resume", "runs/stopped", script=DE_RAINBOW_P[0])
    assert done.returncode == 0, done.stderr[-2000:]
    return process.returncode, err, saved_step, folder / "runs/stopped"


def test_ctrl_c_names_the_way_back(whole, interrupted):
    status, err, saved_step, path = interrupted
    last = err.splitlines()[-1]
    assert status == 130 and "Traceback" not in err
    lost = f"stopped; what came after step {saved_step} is lost; "
    assert re.fullmatch(rf"{lost}go on with: python .*spirl_baselines.py --resume runs/stopped", last), last
    same_end(whole[DE_RAINBOW_P[0]], path)
