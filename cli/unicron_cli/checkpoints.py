"""The commands `unicron checkpoints`: what is saved of training, and what survives a failure."""

import typer

app = typer.Typer(no_args_is_help=True, help="What is saved of training, and what survives a failure.")
