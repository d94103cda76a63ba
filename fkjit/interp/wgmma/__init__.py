"""Matrix products of warpgroups, which run until they are waited for."""
