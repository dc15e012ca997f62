"""What a gateway knows of its workers: prompts, blocks, events, lives."""

from tests.cases.case import Case

END = "gateway/end_to_end"
FLEET = "gateway/fleet"
BODIES = f"{END}/test_bodies.py"
CLIENT = f"{END}/test_openai_client.py"
FAILURES = f"{END}/test_failures.py"
OPERATIONS = f"{END}/test_operations.py"
RELIABILITY = f"{END}/test_reliability.py"
TABLE = "gateway/reliability/test_failures.py"
EVENTS_END = f"{END}/test_event_cases.py"
SHARED = f"{END}/test_shared_index.py"
MEMBERS = f"{FLEET}/test_members.py"
SEQUENCE = f"{FLEET}/test_sequence.py"
INTAKE = f"{FLEET}/test_intake.py"
REKEY = "cachecore/test_rekey.py"
EVENTS = "cachecore/test_events.py"
BEHAVIOUR = "cachecore/index/behaviour.py"
MIRROR = "cachecore/index/test_mirror_faults.py"
POLICIES = "policies/test_policies.py"
KV_AWARE = "policies/test_kv_aware.py"
PULLS = "workers/transfer/test_faults.py"

CASES = {
    # ---- from prompts to blocks ----
    62: Case(
        "a route whose prompts are not read",
        [
            f"{BODIES}::test_a_chat_and_its_token_ids_are_one_prompt",
            f"{CLIENT}::test_text_and_its_token_ids_are_one_prompt",
            f"{BODIES}::test_the_route_says_what_the_prompt_is",
        ],
    ),
    64: Case(
        "a policy that is handed no prompt",
        [
            f"{OPERATIONS}::test_an_explanation_sends_nothing_and_comes_true",
            f"{CLIENT}::test_completions_take_every_form_of_prompt",
        ],
    ),
    65: Case(
        "names by text instead of tokens",
        [
            f"{END}/test_placement.py::test_forty_conversations_are_spread_and_miss_hardly_a_cached_token",
            "cachecore/prompts/test_huggingface.py::test_token_ids_are_those_of_transformers",
            f"{END}/test_policies.py::test_a_worker_that_tokenizes_otherwise_gets_no_affinity",
        ],
    ),
    67: Case(
        "blocks that are not chained",
        [
            f"{REKEY}::test_blocks_are_matched_from_the_beginning_only",
            f"{EVENTS_END}::test_a_block_counts_behind_its_own_prefix_only",
            f"{BEHAVIOUR}::test_only_blocks_from_the_start_count",
        ],
    ),
    68: Case(
        "placeholders of different images",
        [
            f"{REKEY}::test_images_change_names_from_the_block_they_begin_in",
            f"{EVENTS_END}::test_an_image_divides_from_its_block_on",
        ],
    ),
    70: Case(
        "an adapter and a salt of one spelling",
        [
            f"{REKEY}::test_salt_and_adapter_of_one_spelling_differ",
            f"{EVENTS_END}::test_adapter_salt_and_neither_are_three_scopes",
            "cachecore/test_scope.py::test_an_adapter_and_a_salt_of_one_name_differ",
        ],
    ),
    71: Case(
        "salts that events do not carry on",
        [
            f"{REKEY}::test_children_inherit_salt_and_adapter_from_the_root",
            f"{EVENTS_END}::test_adapter_salt_and_neither_are_three_scopes",
            f"{END}/test_tenants.py::test_equal_salts_of_two_tenants_are_not_equal",
        ],
    ),
    73: Case(
        "block sizes that differ",
        [
            f"{REKEY}::test_larger_engine_blocks_stand_for_several_of_ours",
            f"{EVENTS_END}::test_engine_blocks_of_any_ratio",
            f"{EVENTS_END}::test_sizes_that_do_not_divide_cost_the_trust",
        ],
    ),
    74: Case(
        "prompts shorter than a block",
        [
            f"{EVENTS_END}::test_prompts_shorter_than_a_block_are_spread",
            f"{KV_AWARE}::test_short_prompts_spread_by_load",
        ],
    ),
    76: Case(
        "preconditions that fail in silence",
        [
            f"{FLEET}/engines/test_sglang.py::test_what_it_was_started_without",
            f"{FLEET}/engines/test_vllm.py::test_what_it_was_started_without",
            f"{FLEET}/test_lifecycle.py::test_registration_says_what_an_engine_lacks",
            f"{FLEET}/test_trust.py::test_silence_under_traffic_raises_an_alarm_within_ten_seconds",
        ],
    ),
    77: Case(
        "ranks behind one address",
        [
            f"{INTAKE}::test_another_rank_s_events_are_not_credited",
            f"{EVENTS_END}::test_each_rank_has_its_own_blocks",
            f"{BEHAVIOUR}::test_ranks_and_epochs_of_one_worker_are_apart",
        ],
    ),
    # ---- KV events ----
    79: Case(
        "one parent for all blocks of a store",
        [
            f"{REKEY}::test_each_block_s_parent_is_its_predecessor",
            f"{EVENTS_END}::test_each_block_follows_the_one_before",
        ],
    ),
    80: Case(
        "a removal of one of two copies",
        [
            f"{REKEY}::test_a_block_is_held_until_its_last_copy_is_removed",
            f"{EVENTS_END}::test_copies_are_counted_by_tier",
            f"{BEHAVIOUR}::test_removals_never_count_below_zero",
        ],
    ),
    82: Case(
        "a store that contains its own parent",
        [
            f"{REKEY}::test_what_contradicts_itself_costs_itself_only",
            f"{EVENTS_END}::test_what_contradicts_itself_costs_itself_only",
            f"{BEHAVIOUR}::test_a_chain_that_bites_its_tail_is_dropped_alone",
        ],
    ),
    83: Case(
        "gaps that nobody sees",
        [
            f"{SEQUENCE}::test_a_gap_is_filled_by_replay",
            f"{SEQUENCE}::test_a_gap_that_nobody_fills_voids_the_holder",
            f"{EVENTS_END}::test_a_gap_is_filled_by_replay",
            f"{EVENTS_END}::test_a_gap_that_nobody_fills_costs_what_was_known",
        ],
    ),
    85: Case(
        "a replay that comes after live events",
        [
            f"{INTAKE}::test_live_events_wait_for_a_delayed_replay",
            f"{EVENTS_END}::test_a_late_replay_raises_nothing_from_the_dead",
        ],
    ),
    86: Case(
        "recovery that never ends",
        [
            f"{SEQUENCE}::test_live_copies_of_what_a_replay_brought_are_no_restart",
            f"{EVENTS_END}::test_one_gap_is_one_recovery",
        ],
    ),
    88: Case(
        "a cache that was emptied",
        [
            f"{REKEY}::test_clearing_drops_everything_of_this_rank",
            f"{EVENTS_END}::test_each_rank_has_its_own_blocks",
            f"{EVENTS_END}::test_a_cache_emptied_without_a_word_costs_the_trust",
            f"{END}/test_policies.py::test_a_cache_that_its_worker_resets_is_forgotten",
            f"{FLEET}/test_lifecycle.py::test_a_sleeping_engine_gets_nothing_and_wakes_with_nothing",
        ],
    ),
    89: Case(
        "a partial block that is promoted, and said again",
        [
            f"{REKEY}::test_a_partial_block_s_life_is_tolerated",
            f"{EVENTS_END}::test_what_contradicts_itself_costs_itself_only",
        ],
    ),
    91: Case(
        "tokens and hashes that do not fit",
        [
            f"{REKEY}::test_what_contradicts_itself_costs_itself_only",
            f"{EVENTS_END}::test_what_contradicts_itself_costs_itself_only",
            f"{EVENTS}::test_no_event_makes_decoding_raise_or_costs_its_neighbours",
        ],
    ),
    92: Case(
        "blocks of size 0",
        [
            f"{EVENTS}::test_a_bad_or_unknown_event_costs_itself_only",
            f"{EVENTS_END}::test_what_contradicts_itself_costs_itself_only",
        ],
    ),
    94: Case(
        "a parent that was never seen",
        [
            f"{REKEY}::test_a_store_whose_parent_is_unknown_waits_and_is_never_a_root",
            f"{EVENTS_END}::test_a_parent_that_comes_later",
            f"{BEHAVIOUR}::test_a_store_whose_parent_is_unknown_waits_for_it",
        ],
    ),
    95: Case(
        "a restart with a million blocks to load",
        [
            f"{MIRROR}::test_the_server_is_asked_until_the_copy_is_there",
            f"{MIRROR}::test_the_loop_goes_on_while_a_big_holder_is_loaded",
            f"{MIRROR}::test_a_late_gateway_loads_everything",
            f"{SHARED}::test_a_gateway_without_a_mirror_asks_the_server_and_does_without_it",
        ],
        "How long it takes is measured by tests/bench/bench_shared_start.py.",
    ),
    # ---- lives of workers ----
    97: Case(
        "a new process at an old address",
        [
            f"{FAILURES}::test_a_worker_that_restarts_between_two_probes_is_found_out",
            f"{FAILURES}::test_a_dead_workers_requests_go_elsewhere_and_its_next_life_starts_empty",
            f"{EVENTS_END}::test_a_publisher_that_starts_over",
            f"{SHARED}::test_a_life_that_has_ended_is_matched_nowhere",
            f"{PULLS}::test_a_source_that_has_restarted_since",
        ],
    ),
    98: Case(
        "an old address under a new registration",
        [
            f"{MEMBERS}::test_a_name_registered_again_is_at_its_new_address",
            f"{OPERATIONS}::test_a_worker_is_added_under_a_name_of_its_own_and_replaced",
            f"{FLEET}/test_directory.py::test_a_worker_registered_anew_is_replaced_everywhere",
        ],
    ),
    100: Case(
        "a policy without its optional key",
        [
            f"{EVENTS_END}::test_every_policy_does_without_its_options",
            f"{POLICIES}::test_without_a_key_the_least_loaded",
        ],
    ),
    101: Case(
        "a client's mistakes held against the worker",
        [
            f"{EVENTS_END}::test_a_clients_mistakes_are_not_the_workers",
            f"{CLIENT}::test_five_megabytes_of_text_are_the_engines_to_refuse",
            f"{FAILURES}::test_of_what_a_worker_refused_nothing_is_expected",
            f"{RELIABILITY}::test_what_blames_the_client_opens_nothing",
            f"{TABLE}::test_no_4xx_is_ever_held_against_a_worker",
        ],
    ),
    103: Case("two models in one index", [f"{EVENTS_END}::test_two_models_share_nothing"]),
    104: Case(
        "state made anew for each request",
        [
            f"{END}/test_policies.py::test_prefix_aware_needs_no_events",
            f"{END}/test_policies.py::test_round_robin_takes_turns",
        ],
    ),
}
