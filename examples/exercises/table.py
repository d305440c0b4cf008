"""The exercises, one row each: functions in the order in which a sample passes through them, then bugs."""

from typing import NamedTuple


class Exercise(NamedTuple):
    """A function to write, or a bug to find."""

    name: str
    story: str  # where a sample is, and what the function decides there; for a bug, its symptom
    source: str  # paper and section
    minutes: int
    file: str
    function: str  # Class.name for a method
    tests: str  # a file of tests/, then names of tests in it, the most readable first
    bug: str = ""  # list.name in tests/planted


EXERCISES = (
    Exercise(
        "next_wave",
        "A step begins with prompts. Decide when to draw more of them, and how many.",
        "DAPO (arXiv 2503.14476), section 3.2; in waves: WeChat-YATT (arXiv 2508.07970)",
        30,
        "scheduling/dynamic_sampling.py",
        "FirstFinishedSampler.next_draw",
        "scheduling/test_dynamic_sampling.py test_next_wave test_experience_says_what_will_be_filtered"
        " test_in_order_a_step_is_as_wave_by_wave",
    ),
    Exercise(
        "route",
        "A prompt goes to an engine, which generates its answers. Choose the engine.",
        "Mitzenmacher, The Power of Two Choices in Randomized Load Balancing (2001), section 1",
        20,
        "engines/routing.py",
        "Load.choose",
        "engines/test_pool.py test_who_ask_as_often_load_engines_alike"
        " test_route_asks_the_less_loaded_of_two_that_may_be_asked"
        " test_sleep_forgets_what_others_awaited",
    ),
    Exercise(
        "ranks_of_tail",
        "Few answers are unfinished. Choose the ranks that finish them while judges get the others.",
        "RLHFuse (arXiv 2409.13221), section 4",
        40,
        "extras/fused/tail.py",
        "ranks_of_tail",
        "extras/test_fusion.py test_ranks_of_tail test_rollout_never_holds_what_a_judge_needs",
    ),
    Exercise(
        "group_norm",
        "An answer has its reward. Compute how much better it is than its group.",
        "GRPO (arXiv 2402.03300), section 4.1.2",
        5,
        "algorithms.py",
        "group_norm",
        "root/test_algorithms.py test_an_answer_alone_in_its_group_has_nothing_to_be_compared_with"
        " test_advantages_are_the_plain_loop_wherever_the_samples_are[grpo]",
    ),
    Exercise(
        "gae",
        "A critic has valued every token. Compute how much better each is than expected.",
        "Generalized advantage estimation (arXiv 1506.02438), section 3, equation 16",
        20,
        "algorithms.py",
        "gae",
        "root/test_algorithms.py test_the_estimators_are_the_plain_double_loop",
    ),
    Exercise(
        "karmarkar_karp",
        "The samples move to the training ranks. Deal them so that all ranks take equally long.",
        "Karmarkar and Karp, The Differencing Method of Set Partitioning (1982)",
        45,
        "scheduling/balance.py",
        "karmarkar_karp",
        "scheduling/test_balance.py test_karmarkar_karp_by_hand test_karmarkar_karp",
    ),
    Exercise(
        "clipped_loss",
        "The policy learns. Compute the loss of a token, and decide when its ratio is clipped.",
        "PPO (arXiv 1707.06347), section 3, equation 7; DAPO (arXiv 2503.14476), section 3.1",
        15,
        "algorithms.py",
        "clip",
        "root/test_algorithms.py test_the_clip_by_hand"
        " test_the_objective_of_a_step_is_the_plain_loop_however_it_is_split[grpo]",
    ),
    Exercise(
        "resharding_groups",
        "The new weights go back to the engines. Find the ranks that together hold a whole copy.",
        "HybridFlow (arXiv 2409.19256), section 5.3",
        25,
        "scheduling/layout.py",
        "Shape.copies",
        "scheduling/test_layout.py test_a_shape_is_laid_out_as_by_megatron",
    ),
    Exercise(
        "bug_on_four_ranks",
        "Whitened advantages have a deviation of 1 on one rank, but more than 1 on four ranks.",
        "REINFORCE++ (arXiv 2501.03262), section 3",
        20,
        "algorithms.py",
        "whiten",
        "root/test_advantages.py test_every_row_runs_in_the_same_loop[reinforce++-full-1-1]"
        " test_every_row_runs_in_the_same_loop[reinforce++-partial-4-2]",
        bug="algorithms.whitened_without_the_distance_between_ranks",
    ),
    Exercise(
        "bug_in_the_second_step",
        "The first step is right; in the second, answers are labeled with weights 0 instead of 1.",
        "HybridFlow (arXiv 2409.19256), section 5.2",
        20,
        "engines/pool.py",
        "Pool.load_weights",
        "root/test_controller.py test_ranks_need_not_divide_the_prompts",
        bug="engines.weights_of_the_step_before",
    ),
)
