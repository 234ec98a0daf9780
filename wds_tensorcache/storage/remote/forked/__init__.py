"""Object stores for forked processes, such as workers of torch's DataLoader: another process runs obstore for them.

obstore's threads do not exist in a child that was forked after its parent used it, so there a request would never end.
"""
