"""Pages, tables and pictures from the run files."""


def render() -> int:
    """Write the parts ``results`` and ``choosing`` of the pages; return the exit status.

    Training needs none of the libraries of this package, so without them one line says what is
    missing.
    """
    try:
        from lrpe_fairseq.experiments.report import docs
    except ImportError as error:
        print(f"no pages: {error.name} is not installed (pip install -e '.[experiments]')")
        return 0
    return docs.main(["results", "choosing"])
