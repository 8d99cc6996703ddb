"""Calls that cost the host less: checked once, run as one op, with the residual added by the kernel."""
