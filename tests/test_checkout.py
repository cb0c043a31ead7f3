"""A run file names the commit of our own checkout; a wheel says what it lacks."""

import subprocess

import pytest

from lrpe_fairseq.experiments.commands import run_table
from lrpe_fairseq.experiments.records import files


def git(folder, *arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A git repository with one commit of two files."""
    git(tmp_path, "init", "--quiet")
    for name in ("code.py", "results/a.json", "docs/choosing.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    return tmp_path


def test_the_commit_is_marked_dirty_by_every_change_of_what_a_table_does_not_render(repository):
    head = git(repository, "rev-parse", "HEAD")
    (repository / "results" / "a.json").write_text("[]")
    (repository / "docs" / "choosing.md").write_text("lrpe-type2")
    assert files.commit(repository) == head
    (repository / "code.py").write_text("2")
    assert files.commit(repository) == f"{head}-dirty"


def test_the_commit_is_never_that_of_another_repository(repository, monkeypatch):
    site = repository / ".venv" / "lib" / "site-packages"
    site.mkdir(parents=True)
    assert files.commit(site) == "unknown"
    monkeypatch.setenv("GIT_DIR", str(repository / "nowhere"))  # as a git hook does
    assert files.commit(repository) != "unknown"


def test_a_copy_has_the_commit_that_its_user_states(repository, tmp_path_factory, monkeypatch):
    copy = tmp_path_factory.mktemp("copy")
    assert files.commit(copy) == "unknown"
    monkeypatch.setenv(files.STATED, "a" * 40)
    assert files.commit(copy) == "a" * 40
    assert files.commit(repository) == "a" * 40


def test_an_installed_wheel_says_that_tables_need_a_checkout(tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="has no configs, scripts: this command needs a checkout"):
        files.require_checkout(tmp_path)
    monkeypatch.setattr(files.require_checkout, "__defaults__", (tmp_path,))
    assert run_table.main(["table2", "--status"]) == 2
    assert "needs a checkout of the repository" in capsys.readouterr().err
