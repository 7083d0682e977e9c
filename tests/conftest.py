"""What the tests share: the scripts' folder on the path, frames of real games, a trained MAE, and whole runs of the
scripts that go on in the background."""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import spirl_rainbow as spirl  # noqa: E402

torch.set_num_threads(1)  # repeatable, and two runs at once do not fight over the cores

GAMES = ("ALE/Frostbite-v5", "ALE/MsPacman-v5", "ALE/Seaquest-v5", "ALE/BattleZone-v5")


@pytest.fixture(scope="session")
def random_play():
    """uint8 frames (400, 96, 96, 3) of random play of each of the paper's four games, which no MAE was trained on."""
    return {game: spirl.collect_random_frames(spirl.Args(env_id=game, seed=99), 400) for game in GAMES}


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


# Whole runs of the scripts take most of the time. They go one after the other on the machine's second core, from the
# start of the session, while the tests that do not need them go on on the first.
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


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=0, help="runs that test_resume.py kills, each at a random instant")
