"""Score programs: attention that a user writes in `jnp`, entry by entry, compiled into the kernels."""
