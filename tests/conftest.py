"""What the tests share: the scripts' folder on the path, frames of real games, trained MAEs, and whole runs of the
scripts, in this process or in the background. tests/method teaches the method, tests/product guards the programs."""

import gc
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import spirl_baselines  # noqa: E402
import spirl_mae  # noqa: E402
import spirl_rainbow as spirl  # noqa: E402

SCRIPTS = {"spirl_rainbow.py": spirl, "spirl_mae.py": spirl_mae, "spirl_baselines.py": spirl_baselines}

torch.set_num_threads(1)  # repeatable, and two runs at once do not fight over the cores

GAMES = ("ALE/Frostbite-v5", "ALE/MsPacman-v5", "ALE/Seaquest-v5", "ALE/BattleZone-v5")


@pytest.fixture(scope="session")
def random_play():
    """uint8 frames (400, 96, 96, 3) of random play of each of the paper's four games, which no MAE was trained on."""
    return {game: spirl.collect_random_frames(spirl.Args(env_id=game, seed=99), 400).numpy() for game in GAMES}


@pytest.fixture(scope="session")
def maes():
    """The trained MAE of each game."""
    maes = {game: spirl.MaskedAutoencoder().eval().requires_grad_(False) for game in GAMES}
    for game, mae in maes.items():
        spirl.load_mae(ROOT / f"tests/weights/{game[4:-3]}.pt", mae, spirl.Args(env_id=game))
    return maes


@pytest.fixture(scope="session")
def trained_mae(maes):
    return maes["ALE/Frostbite-v5"]


@pytest.fixture
def refused(capsys):
    """`with refused(message):` what is inside exits with status 2 and prints nothing but one line on stderr, "error: "
    and what the regular expression `message` matches; with `begun`, only after what a run prints when it begins."""

    @contextmanager
    def refusal(message, begun=False):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            yield
        out, err = capsys.readouterr()
        line = err.splitlines()[-1]
        assert stop.value.code == 2 and re.match(f"error: {message}", line), err
        assert begun or (out == "" and err == line + "\n"), (out, err)

    return refusal


# A small model and short games: the whole pipeline in some seconds.
MACHINE = "--threads 1 --device cpu".split()
SIZES = "--image-size 48 --encoder-depth 1 --decoder-dim 32 --decoder-depth 2".split() + MACHINE
PRETRAINING = "--mae-frames 64 --mae-epochs 1 --mae-batch-size 32".split()
PLAY = "--max-episode-frames 400 --learning-starts 120 --buffer-size 150 --eval-episodes 3".split() + MACHINE
SMALL = SIZES + PRETRAINING + PLAY
LOADED = SIZES + PLAY  # the same with a MAE that is there already


def run(folder, *flags, script="spirl_rainbow.py", **environment):
    command, env = [sys.executable, ROOT / script, *map(str, flags)], os.environ | environment
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def finished(folder, name, *flags, script="spirl_rainbow.py"):
    """Run to the end; returns the run's folder and its results, with what it printed."""
    done, path = run(folder, *flags, "--run-name", name, script=script), folder / "runs" / name
    assert done.returncode == 0, done.stderr[-3000:]
    return path, json.loads((path / "results.json").read_text()) | {"printed": done.stdout}


def run_here(folder, monkeypatch, *flags, script="spirl_rainbow.py"):
    """The script's `__main__` in this process: its variables after the run."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [script, *map(str, flags)])
    threads, interrupt = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    try:
        return runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
        signal.signal(signal.SIGINT, interrupt)
        for file in gc.get_objects():  # the run's lock, which its process would hold to its end
            if type(file) is io.TextIOWrapper and str(getattr(file, "name", "")).endswith("args.json"):
                file.close()


def files(path):
    """The files of a run's folder, but for TensorBoard's."""
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file() and "tfevents" not in file.name}


def scalars(path):
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# Whole runs of the scripts take most of the time. They go one after the other on the machine's second core, from the
# start of the session, while other tests run on the first.
RUNS = {}  # name of a fixture: function(folder) that makes the runs
UNDER_WAY = {}  # name of a fixture: the Future of what its function returns
SECOND_CORE = ThreadPoolExecutor(1)
FOLDER = tempfile.TemporaryDirectory(prefix="spirl-tests-")


def in_background(function):
    """Makes a fixture of function(folder): what it returns, once the runs that it makes in `folder` have ended."""
    RUNS[function.__name__] = function
    return pytest.fixture(scope="session", name=function.__name__)(lambda: UNDER_WAY[function.__name__].result())


def pytest_collection_modifyitems(items):
    """Tests that need a run come last, in the order in which the runs end."""
    order = list(RUNS)
    items.sort(key=lambda item: max((1 + order.index(name) for name in item.fixturenames if name in RUNS), default=0))


def pytest_collection_finish(session):
    needed = {name for item in session.items for name in item.fixturenames}
    for name, function in RUNS.items():
        if name in needed and not session.config.option.collectonly and not session.testsfailed:
            folder = Path(FOLDER.name, name)
            folder.mkdir()
            UNDER_WAY[name] = SECOND_CORE.submit(function, folder)


def pytest_sessionfinish():
    SECOND_CORE.shutdown(cancel_futures=True)
