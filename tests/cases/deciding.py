"""What comes of it: decisions, memory, the shared index, KV that moves, and the audit of all that."""

from tests.cases.case import Case

EDGE = "gateway/edge"
END = "gateway/end_to_end"
FLEET = "gateway/fleet"
STREAMS = f"{EDGE}/test_event_streams.py"
REQUESTS = "gateway/test_requests.py"
FIRST_TOKEN = "gateway/test_first_token.py"
OPERATIONS = f"{END}/test_operations.py"
SHARED = f"{END}/test_shared_index.py"
MEMBERS = f"{FLEET}/test_members.py"
INDEX = "cachecore/index/test_memory.py"
BEHAVIOUR = "cachecore/index/behaviour.py"
MIRROR = "cachecore/index/test_mirror_faults.py"
LOSSES = "cachecore/index/test_losses.py"
STORE = "cachecore/store/test_faults.py"
POLICIES = "policies/test_policies.py"
KV_AWARE = "policies/test_kv_aware.py"
INFLIGHT = "policies/state/test_inflight.py"
PULLS = "workers/transfer/test_faults.py"
CEILINGS = "loadtest/audit/test_ceilings.py"
IDS = "loadtest/traces/test_block_ids.py"
LOADTEST = "loadtest/client"

CASES = {
    # ---- decisions ----
    106: Case(
        "ties that always go to the same worker",
        [
            f"{POLICIES}::test_ties_spread",
            f"{KV_AWARE}::test_ties_of_short_prompts_spread",
            f"{KV_AWARE}::test_calibration_noise_does_not_unbalance_an_idle_fleet",
            "policies/peers/test_peers.py::test_equals_are_picked_alike",
        ],
    ),
    107: Case(
        "a burst that does not see itself",
        [
            f"{POLICIES}::test_a_burst_over_warm_workers_is_shared",
            f"{KV_AWARE}::test_a_burst_over_warm_workers_is_shared",
            f"{POLICIES}::test_a_burst_of_siblings_is_bounded",
            f"{POLICIES}::test_load_counts_at_dispatch",
        ],
    ),
    109: Case(
        "ties that tear conversations apart",
        [
            f"{KV_AWARE}::test_a_session_sticks_among_equals_only",
            f"{KV_AWARE}::test_a_tie_never_costs_a_cached_block",
            "policies/test_closed_loop.py::test_history_serves_where_workers_publish_no_events",
            f"{END}/test_policies.py::test_kv_aware_follows_its_own_history_where_there_are_no_events",
        ],
    ),
    110: Case(
        "what nobody has goes to a busy worker",
        [f"{POLICIES}::test_a_busy_worker_draws_no_new_prompts", f"{KV_AWARE}::test_a_miss_goes_to_the_least_loaded"],
    ),
    112: Case(
        "load that counts from the answer on instead of the dispatch",
        [f"{POLICIES}::test_load_counts_at_dispatch", f"{INFLIGHT}::test_a_request_from_dispatch_to_finish"],
    ),
    113: Case(
        "several gateways, each of which knows its own part alone",
        [
            f"{SHARED}::test_every_turn_hits_whichever_gateway_it_is_sent_to",
            f"{SHARED}::test_what_one_gateway_has_sent_is_load_to_the_other",
            f"{FLEET}/test_peers.py::test_four_gateways_keep_equal_accounts_that_end_at_zero",
            f"{END}/test_admission.py::test_a_share_is_one_over_gateways_and_they_work_on_without_the_server",
        ],
    ),
    115: Case(
        "a branch of the policy that remembers nothing of where it sent a request",
        [
            f"{END}/test_policies.py::test_prefix_aware_needs_no_events",
            "policies/state/test_history.py::test_remembers_where_prompts_went",
        ],
        "No policy here has a shortest match below which it does without the prefix.",
    ),
    116: Case(
        "the first match instead of the longest",
        [
            f"{POLICIES}::test_longest_match",
            f"{KV_AWARE}::test_longest_match_wins_when_loads_are_equal",
            f"{BEHAVIOUR}::test_the_deepest_holder_is_seen_beside_shallower_ones",
        ],
    ),
    118: Case(
        "decisions by what engines said seconds ago",
        [
            f"{INFLIGHT}::test_requests_of_others_take_slots_while_the_report_is_fresh",
            f"{INFLIGHT}::test_a_report_of_our_own_requests_changes_nothing",
            f"{POLICIES}::test_load_counts_at_dispatch",
        ],
    ),
    119: Case(
        "to ask changes what is known",
        [
            f"{BEHAVIOUR}::test_matching_changes_nothing",
            f"{KV_AWARE}::test_deciding_changes_nothing",
            "policies/state/test_history.py::test_asking_changes_nothing",
            "policies/test_estimates.py::test_asking_makes_nothing",
            "policies/test_shadow.py::test_what_is_served_does_not_depend_on_shadows",
        ],
    ),
    121: Case(
        "a beginning that all prompts share draws all of them to one worker",
        [
            "loadtest/audit/test_golden.py::test_the_first_block_that_all_prompts_share_concentrates_nothing",
            f"{CEILINGS}::test_a_beginning_that_all_share_draws_all_to_one_node",
            f"{POLICIES}::test_a_first_block_that_all_prompts_share_does_not_draw_them_together",
        ],
    ),
    # ---- memory ----
    122: Case(
        "an index without bounds",
        [
            f"{INDEX}::test_a_bound_shortens_the_least_recently_matched",
            f"{INDEX}::test_a_bound_takes_what_hangs_below_first",
            f"{INDEX}::test_forgetting_is_swept_in_bounded_steps",
            "policies/state/test_history.py::test_the_least_recently_sent_goes_first",
            "policies/state/test_predictions.py::test_bounded_oldest_first",
            "cachecore/prompts/test_naming.py::test_one_off_tails_leave_before_what_was_met_again",
        ],
    ),
    124: Case(
        "runs that are split and never joined",
        [
            f"{INDEX}::test_branching_again_and_again_leaves_no_fragments",
            f"{INDEX}::test_punching_and_filling_holes_comes_back_to_one_run",
        ],
    ),
    125: Case(
        "what removed workers leave behind",
        [
            f"{MEMBERS}::test_workers_that_come_and_go_leave_nothing",
            f"{OPERATIONS}::test_workers_come_and_go_while_requests_flow",
            f"{INDEX}::test_holders_that_come_and_go_leave_nothing",
            f"{FLEET}/test_trust_watch.py::test_what_is_kept_of_workers_goes_with_them",
            "policies/test_estimates.py::test_models_are_kept_by_worker_and_forgotten_with_it",
        ],
    ),
    # ---- the shared index ----
    127: Case(
        "a server that does not answer holds every request",
        [
            f"{STORE}::test_a_frozen_server",
            "faults/test_shared_index.py::test_nobody_who_asks_notices",
            f"{SHARED}::test_a_gateway_without_a_mirror_asks_the_server_and_does_without_it",
            f"{FLEET}/test_peers.py::test_a_frozen_server_is_done_without",
        ],
    ),
    128: Case(
        "a server that was away at the start is never asked again",
        [
            f"{STORE}::test_down_at_the_start_and_up_later",
            f"{SHARED}::test_a_server_that_comes_late_and_goes_for_good",
            f"{FLEET}/test_peers.py::test_a_server_that_is_away_at_the_start_is_joined_later",
        ],
    ),
    130: Case(
        "a look-up that nobody answers",
        [
            f"{STORE}::test_a_network_that_swallows_everything",
            f"{STORE}::test_late_answers_reach_nobody",
            "gateway/test_remote_tokens.py::test_where_answers_are_late_again_and_again_nobody_waits_for_a_while",
        ],
    ),
    131: Case(
        "a default wins over what was configured, and nobody says so",
        [
            "gateway/test_config.py::test_variables_win_over_the_file_and_flags_over_both",
            "gateway/test_config.py::test_what_is_wrong_is_said_with_its_place",
            f"{SHARED}::test_without_a_keyring_no_gateway_shares",
            f"{SHARED}::test_each_worker_is_followed_once_and_seen_by_all",
        ],
        "One key, `redis`, says where the index lies: there is no second one to contradict it.",
    ),
    133: Case(
        "a removal that failed leaves entries for ever",
        [
            f"{LOSSES}::test_what_was_applied_meanwhile_is_written_when_the_server_is_back",
            f"{MIRROR}::test_what_was_written_of_the_dead_does_not_revive_them",
            f"{MIRROR}::test_others_forget_for_themselves",
            f"{SHARED}::test_a_life_that_has_ended_is_matched_nowhere",
        ],
    ),
    134: Case(
        "a server that was emptied, or drops keys by itself, is never told again",
        [
            f"{MIRROR}::test_everything_is_flushed",
            f"{LOSSES}::test_an_emptied_server_is_written_anew",
            f"{LOSSES}::test_a_key_that_was_evicted_is_found_missing",
            f"{LOSSES}::test_losses_and_events_go_through_and_the_rest_when_there_is_memory",
            f"{SHARED}::test_an_emptied_server_is_told_again",
            "cachecore/store/test_connection.py::test_a_full_server_refuses_and_stays_in_use",
        ],
    ),
    # ---- KV that moves ----
    136: Case(
        "a source that is gone is waited for, rank by rank",
        [
            f"{PULLS}::test_a_source_that_hangs_until_the_deadline",
            f"{PULLS}::test_a_source_that_hangs_before_the_deadline_is_given_up",
            "policies/state/test_sources.py::test_a_source_that_fails_is_left_alone_for_longer_each_time_by_whom_it_failed",
            f"{END}/test_transfer.py::test_a_source_that_disappoints_costs_time_and_no_answer",
        ],
    ),
    137: Case(
        "a transfer that fails strands its request and its blocks",
        [
            f"{PULLS}::test_a_source_that_is_cut_off_within_a_layer",
            f"{PULLS}::test_a_truncated_frame",
            f"{PULLS}::test_a_source_that_has_restarted_since",
            f"{PULLS}::test_a_client_that_leaves_gives_everything_back",
            f"{END}/test_transfer.py::test_a_source_that_disappoints_costs_time_and_no_answer",
        ],
    ),
    139: Case(
        "the first of two legs asks for what contradicts itself, and fails unseen",
        [
            f"{REQUESTS}::test_a_prefill_asks_for_one_token_of_the_same_prompt",
            f"{REQUESTS}::test_the_length_is_asked_for_as_the_client_does",
            f"{REQUESTS}::test_a_prefill_calls_no_tool",
            f"{END}/test_disaggregation.py::test_the_prompt_is_computed_by_the_one_and_answered_by_the_other",
            f"{END}/test_disaggregation.py::test_a_first_leg_that_fails_costs_time_and_no_answer",
        ],
    ),
    140: Case(
        "one combination of settings hangs",
        [
            f"{PULLS}::test_a_source_that_hangs_until_the_deadline",
            f"{PULLS}::test_others_run_while_one_waits",
        ],
        "The settings are another product's; whatever hangs here ends at its plan's deadline.",
    ),
    # ---- audit and load tests ----
    142: Case(
        "part of a block counts as a whole one, and more is hit than was asked",
        [
            f"{CEILINGS}::test_a_share_is_a_share_whatever_the_last_blocks_hold",
            f"{CEILINGS}::test_weights",
            "loadtest/audit/test_auditing.py::test_every_token_is_hit_or_missed_for_a_reason",
        ],
    ),
    143: Case(
        "hit rates that nobody can compare, because nobody says what was counted",
        [
            f"{CEILINGS}::test_golden",
            f"{CEILINGS}::test_weights",
            f"{IDS}::test_mooncake_is_milliseconds_and_ids_hold_for_the_file",
        ],
        "The formulas stand in docs/audit.md; how last blocks are counted, in what is said of each trace.",
    ),
    145: Case(
        "a trace is replayed with another block size than its own",
        [
            f"{IDS}::test_block_sizes_are_inferred",
            f"{IDS}::test_a_stated_block_size_is_kept_and_judged",
            "loadtest/traces/test_reading.py::test_public_files_are_sound",
        ],
    ),
    146: Case(
        "the time to first token ends with something that is no token",
        [
            f"{STREAMS}::test_the_first_token_is_neither_a_comment_nor_a_role",
            f"{FIRST_TOKEN}::test_what_took_no_computing_is_no_token",
            f"{FIRST_TOKEN}::test_the_first_part_of_an_answer",
            f"{LOADTEST}/test_running.py::test_the_time_to_first_token_is_to_the_first_content",
            f"{LOADTEST}/test_events.py::test_the_first_token_is_the_first_content",
        ],
    ),
    148: Case(
        "a piece of the network's is taken for an event",
        [
            f"{LOADTEST}/test_events.py::test_a_stream_says_the_same_wherever_it_is_cut",
            f"{LOADTEST}/test_events.py::test_a_byte_at_a_time",
            f"{FIRST_TOKEN}::test_it_comes_with_its_last_byte",
        ],
    ),
    149: Case(
        "something near the beginning of a prompt changes with every turn",
        [
            "loadtest/audit/test_divergence.py::test_a_clock_in_the_system_prompt_is_named",
            "loadtest/audit/test_divergence.py::test_clocks_of_many_forms",
            "loadtest/audit/test_divergence.py::test_other_things_that_change",
            "loadtest/audit/test_audit_cli.py::test_a_log_with_a_clock_in_its_system_prompt_is_told_so",
        ],
    ),
    151: Case(
        "units, block sizes and the reach of ids differ from format to format",
        [
            f"{IDS}::test_weka_ids_hold_within_a_session",
            f"{IDS}::test_mooncake_is_milliseconds_and_ids_hold_for_the_file",
            f"{IDS}::test_qwen_turns_follow_their_parent",
            "loadtest/traces/test_lengths.py::test_llmservingsim_flat_and_sessions",
        ],
    ),
}
