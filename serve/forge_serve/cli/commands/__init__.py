"""Commands of `forge-jax`: each file adds its parser and runs it. None imports anything heavy
before it runs.
"""
