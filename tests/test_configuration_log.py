"""The configuration is logged once the options are checked, never above a refusal."""

import logging

import fairseq.models
import fairseq.tasks
import pytest
from omegaconf import OmegaConf

from lrpe_fairseq.compat import configuration_log
from lrpe_fairseq.errors import refuse
from lrpe_fairseq.experiments.records.files import CONFIGS, ROOT
from tests.end_to_end.forked import run_forked

CONFIG = OmegaConf.create({"common": {"seed": 1}})


@pytest.fixture
def said():
    """A logger of a command, and what reaches its handler."""
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logger = logging.getLogger("fairseq_cli.train")
    logger.addHandler(handler)
    level, logger.level = logger.level, logging.INFO
    yield logger, heard
    logger.removeHandler(handler)
    logger.level = level
    configuration_log.HELD.records.clear()


def test_the_configuration_is_logged_before_the_model(said):
    logger, heard = said
    logger.info(CONFIG)
    logger.info("loading model(s) from a.pt")
    assert heard == []
    configuration_log._built(lambda: None)
    logger.info("a model")
    assert heard == [str(CONFIG), "loading model(s) from a.pt", "a model"]
    logger.info(CONFIG)
    logger.info("a model of another task")
    assert heard[3:] == [str(CONFIG), "a model of another task"]


def test_a_refusal_drops_the_configuration_and_another_error_shows_it(said, capsys):
    logger, heard = said
    logger.info(CONFIG)
    with pytest.raises(SystemExit):
        configuration_log._checked(lambda: refuse("choose another"))
    logger.info("later")
    assert heard == ["later"]
    logger.info(CONFIG)
    with pytest.raises(ZeroDivisionError):
        configuration_log._checked(lambda: 1 / 0)
    assert heard == ["later", str(CONFIG)]
    assert capsys.readouterr().err == "lrpe_fairseq: choose another\n"


def test_the_functions_that_check_options_are_those_that_fairseq_calls():
    assert fairseq.tasks.setup_task.func is configuration_log._checked
    assert fairseq.models.build_model.func is configuration_log._built
    for command in configuration_log.COMMANDS:
        assert configuration_log.HELD in logging.getLogger(f"fairseq_cli.{command}").filters


@pytest.mark.end_to_end
@pytest.mark.parametrize("folder", ["lm"])
def test_a_wrong_option_of_a_shipped_configuration_ends_in_its_sentence(folder, tmp_path):
    """hydra's report of itself was 340 lines."""
    words = ["--config-dir", str(CONFIGS / folder), "--config-name", "text"]
    (tmp_path / "dict.txt").write_text("a 1\n")
    words += [f"task.data={tmp_path}", f"checkpoint.save_dir={tmp_path}/c", "common.cpu=true"]
    words += ["common.tensorboard_logdir=null", "model.fox_bias=nan"]
    ended = run_forked("fairseq_cli.hydra_train", words, cwd=ROOT)
    assert ended.returncode == 2
    everything = ended.stdout + ended.stderr
    assert ended.stderr.endswith("lrpe_fairseq: --fox-bias must be a finite number, not nan\n")
    assert "save_interval" not in everything
    assert len(everything.splitlines()) < 30


def test_no_shipped_configuration_lets_hydra_report_itself():
    for path in CONFIGS.glob("*/*.yaml"):
        text = path.read_text(encoding="utf-8")
        if "hydra_logging" in text:
            logging_of_hydra = OmegaConf.load(path).hydra.hydra_logging
            assert logging_of_hydra == {"root": {"level": "INFO", "handlers": []}}, path
