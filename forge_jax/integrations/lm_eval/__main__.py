"""The harness's command, with the model `forge-jax`."""

from forge_jax.integrations.lm_eval import cli_evaluate

if __name__ == "__main__":
    cli_evaluate()  # pyright: ignore[reportCallIssue]: without the harness, it resolves to this file
