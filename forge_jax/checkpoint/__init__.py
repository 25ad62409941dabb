"""Checkpoints: finding them (`hub`), reading their tensors (`folder`), loading leaves (`load`)."""
