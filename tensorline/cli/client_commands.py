import typer

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    return
