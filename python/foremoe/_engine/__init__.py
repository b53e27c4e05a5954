"""Execution of plans, shared by foremoe.torch and foremoe.megatron. Private."""
