"""A run that survives: killed at any instant and resumed, it ends bit for bit as the run that was never stopped."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import ROOT
from test_script import SMALL, finished, run, run_here, scalars

import spirl_mae

# Short games and few of them: an evaluation is soon over.
TINY = [*SMALL, "--mae-epochs", "3", "--total-timesteps", "170", "--checkpoint-frequency", "20",
        "--eval-frequency", "90", "--max-episode-frames", "240", "--eval-episodes", "1"]
RUNS = {
    "spirl": ["spirl_rainbow.py", *TINY],
    "de-rainbow-p": ["spirl_baselines.py", "--method", "de-rainbow-p", "--mae-frames", "150",
                     *SMALL[SMALL.index("--max-episode-frames") :], "--total-timesteps", "170",
                     "--checkpoint-frequency", "20", "--eval-frequency", "90", "--eval-episodes", "1"],
}


def same_end(one, two):
    """Two run folders hold the same weights, scores and curves, bit for bit."""
    for name in ("mae.pt", "agent.pt"):
        assert (one / name).exists() == (two / name).exists()
        if (one / name).exists():
            models = [torch.load(path / name, weights_only=True)["model"] for path in (one, two)]
            assert all(torch.equal(models[0][key], models[1][key]) for key in models[0]), name
    results = [json.loads((path / "results.json").read_text()) for path in (one, two)]
    for name in ("scores", "evaluations", "training_scores", "updates", "games", "cache_misses", "K",
                 "held_out_losses", "final_loss"):
        assert results[0].get(name) == results[1].get(name), name
    for part in (".", "mae"):
        curves = [scalars(path / part) if (path / part).exists() else {} for path in (one, two)]
        for tag in curves[0] | curves[1]:  # no step twice, no gap
            timed = tag == "charts/SPS"
            points = [[point[:1] if timed else point for point in curve[tag]] for curve in curves]
            assert points[0] == points[1] and len({point[0] for point in points[0]}) == len(points[0]), tag
    assert not list(two.rglob("checkpoint.pt"))


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


def test_killed_at_random_instants(tmp_path, whole, request):
    """`--kills 20` for more. Every other run is killed twice, the second time while it goes on."""
    path, kills, seed = whole("spirl"), request.config.getoption("--kills"), random.randrange(10**6)
    began = (path / "args.json").stat().st_mtime
    lasts = (path / "results.json").stat().st_mtime - began
    rng = random.Random(seed)
    instants = [rng.uniform(i, i + 1) / kills * lasts for i in range(kills)]  # spread over the whole run
    print(f"seed {seed}: kills after", [f"{instant:.1f} s" for instant in instants])

    def kill(folder, flags, instant):
        process = subprocess.Popen([sys.executable, ROOT / RUNS["spirl"][0], *flags], cwd=tmp_path,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (folder / "args.json").exists():
            time.sleep(0.01)
        time.sleep(instant)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (folder / "checkpoint.pt").exists():
            return f"step {torch.load(folder / 'checkpoint.pt', weights_only=True)['run']['step']}"
        return "mae.pt" if (folder / "mae.pt").exists() else f"epochs: {(folder / 'mae/checkpoint.pt').exists()}"

    def survive(number, sooner=1.0):
        folder = tmp_path / "runs" / f"kill{number}"
        told = [kill(folder, [*RUNS["spirl"][1:], "--run-name", folder.name], sooner * instants[number])]
        if number % 2 and not (folder / "results.json").exists():
            told.append(kill(folder, ["--resume", folder], sooner * random.Random(seed + number).uniform(3, 9)))
        if (folder / "results.json").exists():  # this one was faster than the first: once more, a little earlier
            shutil.rmtree(folder)
            return survive(number, 0.8 * sooner)
        done = run(tmp_path, "--resume", f"{folder}/")
        assert done.returncode == 0, (told, done.stderr[-2000:])
        same_end(path, folder)
        return told

    with ThreadPoolExecutor(2) as pool:
        reached = list(pool.map(survive, range(kills)))
    print(f"{sum(map(len, reached))} kills; what was there then:", reached)


KILLER = """
import os, runpy, signal, sys

import torch

where, call, script, *sys.argv[1:] = sys.argv[1:]
left = int(call)


def deadly(function, before=True, half=False):
    def wrapped(*args, **more):
        global left
        counts = "checkpoint.pt" in str(args[1]) and "/mae/" not in str(args[1]) if "a checkpoint" in where else True
        left -= counts
        if left == 0 and counts:
            if not before:
                function(*args, **more)
            if half:
                os.truncate(args[1], os.path.getsize(args[1]) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **more)

    return wrapped


if where == "a step of pre-training":
    torch.nn.utils.get_total_norm = deadly(torch.nn.utils.get_total_norm)
elif where == "an update":
    torch.nn.utils.clip_grad_norm_ = deadly(torch.nn.utils.clip_grad_norm_)
elif where == "a checkpoint half written":
    torch.save = deadly(torch.save, before=False, half=True)
else:
    os.replace = deadly(os.replace, before=where == "a checkpoint not yet renamed")
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize("first, second", [
    # steps of pre-training are 2 an epoch; updates begin at step 120, and games last 60 steps; checkpoints are
    # written at steps 20, 40, 60, 80, 90 (before an evaluation), 100 and so on
    (("spirl", "a step of pre-training", 4), ("de-rainbow-p", "an update", 11)),
    (("spirl", "a checkpoint half written", 5), ("de-rainbow-p", "a checkpoint not yet renamed", 7)),
])
def test_killed_at_a_chosen_instant(tmp_path, whole, first, second):
    def survive(case):
        name, where, call = case
        folder = tmp_path / "runs" / f"{name}-{where}-{call}".replace(" ", "-")
        script, *flags = RUNS[name]
        command = [sys.executable, "-c", KILLER, where, call, ROOT / script, *flags, "--run-name", folder.name]
        killed = subprocess.run([str(part) for part in command], cwd=tmp_path, capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
        done = run(tmp_path, "--resume", folder, script=script)
        assert done.returncode == 0, done.stderr[-2000:]
        same_end(whole(name), folder)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(whole, (first[0], second[0])))
        list(pool.map(survive, (first, second)))


def test_resume_refuses_what_it_cannot_go_on_with(tmp_path, whole, monkeypatch, capsys):
    finished_run, other_script = whole("spirl"), tmp_path / "other"
    other_script.mkdir()
    (other_script / "args.json").write_text(json.dumps(vars(spirl_mae.Args())))
    (tmp_path / "empty").mkdir()
    for folder in (finished_run, other_script, tmp_path / "empty", tmp_path / "nowhere"):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run_here(tmp_path, monkeypatch, "--resume", folder)
        err = capsys.readouterr().err
        assert stop.value.code == 2 and err.count("\n") == 1
        assert err.startswith(f"error: --resume {folder} is not the folder of an unfinished run of this script")


def test_a_game_that_does_not_come_back_is_refused(tmp_path, whole):
    script, *flags = RUNS["de-rainbow-p"]
    command = [sys.executable, "-c", KILLER, "an update", "30", ROOT / script, *flags, "--run-name", "run"]
    subprocess.run([str(part) for part in command], cwd=tmp_path, capture_output=True)
    path = tmp_path / "runs/run/checkpoint.pt"
    content = torch.load(path, weights_only=True)
    content["observation"] += 1  # as if the emulator drew another picture
    torch.save(content, path)
    done = run(tmp_path, "--resume", "runs/run", script=script)
    assert done.returncode == 2 and "the game is not where it was at step 160" in done.stderr
    path.write_bytes(path.read_bytes()[:1000])
    done = run(tmp_path, "--resume", "runs/run", script=script)
    assert done.returncode == 2 and "checkpoint.pt is not a checkpoint" in done.stderr
