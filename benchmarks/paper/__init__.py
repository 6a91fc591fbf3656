"""The claims of the FlashAttention paper (Dao et al., NeurIPS 2022), each measured by a section of its own."""
