"""fairseq reads a path with a colon, such as a folder named after an encoding, as one path."""

from fairseq import utils

import lrpe_fairseq  # noqa: F401  applies the fixes


def test_an_existing_path_with_a_colon_is_one_path(tmp_path):
    folder = tmp_path / "linear-gated:path:rope"
    folder.mkdir()
    model = folder / "checkpoint_best.pt"
    model.touch()
    assert utils.split_paths(str(model)) == [str(model)]


def test_an_ensemble_of_paths_is_still_split(tmp_path):
    first, second = tmp_path / "a:b.pt", tmp_path / "c.pt"
    first.touch()
    second.touch()
    assert utils.split_paths(f"{first}:{second}") == [str(first), str(second)]
    assert utils.split_paths("absent/a.pt:absent/b.pt") == ["absent/a.pt", "absent/b.pt"]
