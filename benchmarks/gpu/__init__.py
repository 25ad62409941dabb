"""GPU measurements that a CPU cannot show: one command, a few minutes, one report."""
