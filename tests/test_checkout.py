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
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text("{}")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "choosing.md").write_text("none")
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


def test_a_package_inside_another_repository_does_not_record_its_commit(repository):
    site = repository / ".venv" / "lib" / "site-packages"
    site.mkdir(parents=True)
    assert files.commit(site) == "unknown"


def test_variables_of_a_git_hook_do_not_name_another_repository(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(repository / "nowhere"))
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
