"""The push of shards to engines of several ranks. HybridFlow (arXiv 2409.19256), section 5.3.

Each rank of such an engine gets the shard that it needs, from the actor on its own rank. That works if an
engine's ranks are t / t_g apart (t: --tp, t_g: --rollout-tp): engine rank j then lies among the actor's ranks
that hold the t / t_g parts of its shard, and only these are joined. Example with t = 4, t_g = 2:

    actor                   rank 0   1   2   3      parts 0, 1, 2, 3
    joined                       0 + 1   2 + 3      to shard 0, to shard 1
    engines                      0 ----- 2          shards 0 and 1
                                     1 ----- 3
"""
