"""What foremoe.torch and foremoe.megatron share when they execute plans. Private: import from those two."""
