"""Between clients and workers: bodies, streams, connections, headers."""

from tests.cases.case import Case

EDGE = "gateway/edge"
END = "gateway/end_to_end"
FLEET = "gateway/fleet"
BODIES = f"{END}/test_bodies.py"
FIDELITY = f"{END}/test_fidelity.py"
CLIENT = f"{END}/test_openai_client.py"
EXCHANGE = f"{EDGE}/test_exchange.py"
SERVER = f"{EDGE}/test_server.py"
STREAMS = f"{EDGE}/test_event_streams.py"
MANY = f"{EDGE}/test_many_at_once.py"
STRIPPING = f"{EDGE}/test_stripping.py"
REQUESTS = "gateway/test_requests.py"
USAGE = "gateway/test_usage.py"
FIRST_TOKEN = "gateway/test_first_token.py"
FAILURES = f"{END}/test_failures.py"
RELIABILITY = f"{END}/test_reliability.py"
HEDGING = f"{EDGE}/test_hedging.py"
EVENTS_END = f"{END}/test_event_cases.py"
MEMBERS = f"{FLEET}/test_members.py"
LOADTEST = "loadtest/client"

CASES = {
    # ---- request bodies ----
    1: Case(
        "chats are not rendered, so that only plain prompts are placed by what is cached",
        [
            f"{BODIES}::test_a_chat_and_its_token_ids_are_one_prompt",
            f"{END}/test_conversation.py::test_turns_go_where_the_first_one_went",
            f"{END}/test_conversation.py::test_a_streamed_turn_is_found_like_any_other",
            "gateway/test_engines.py::test_a_prompt_whose_engine_is_slow_to_render_is_placed_by_load",
        ],
    ),
    2: Case(
        "a message's text in parts breaks its rendering",
        [
            f"{BODIES}::test_text_in_parts_is_what_the_template_makes_of_it",
            "cachecore/prompts/test_messages.py::test_content",
            "cachecore/prompts/test_template.py::test_content_format",
        ],
    ),
    4: Case(
        "a conversation of nothing is a fault of the server's",
        [
            f"{FIDELITY}::test_a_request_that_cannot_be_understood_names_the_field",
            f"{FIDELITY}::test_a_prompt_that_is_none_names_the_field",
            "cachecore/prompts/test_template.py::test_malformed_requests_are_refused_by_name",
        ],
    ),
    5: Case(
        "a schema stricter than the engine's refuses a tool",
        [
            f"{BODIES}::test_many_tools_one_of_them_without_parameters",
            f"{CLIENT}::test_tools_are_part_of_the_prompt_and_arrive_unchanged",
            "cachecore/prompts/test_template.py::test_tools_are_filled_in_and_ordered_as_the_engine_s_schema_does",
        ],
    ),
    7: Case(
        "parameters that the gateway does not know are lost, or change their type",
        [
            f"{BODIES}::test_parameters_of_engines_keep_their_values_and_types",
            f"{FIDELITY}::test_every_unknown_field_arrives_byte_for_byte",
            f"{FIDELITY}::test_large_and_small_numbers_stay_exact",
            f"{FIDELITY}::test_kv_transfer_params_are_stripped_and_nothing_else",
            f"{EDGE}/test_body.py::test_splicing_random_documents",
        ],
    ),
    8: Case(
        "hints to the router travel on to the engine",
        [
            f"{BODIES}::test_headers_travel_alike_on_every_route",
            f"{BODIES}::test_parameters_of_engines_keep_their_values_and_types",
        ],
        "No key of a body is a hint to the gateway, `tokens` least of all: hints are headers, which stay here.",
    ),
    10: Case(
        "what a body holds decides what it is, instead of its route; errors without words",
        [
            f"{BODIES}::test_the_route_says_what_the_prompt_is",
            f"{REQUESTS}::test_kinds",
            f"{SERVER}::test_targets_are_normalized",
            f"{FIDELITY}::test_what_is_not_a_json_object_is_refused",
        ],
    ),
    11: Case(
        "one part accepts what another fails on",
        [f"{BODIES}::test_stop_sequences_are_the_engines_to_judge"],
    ),
    13: Case(
        "of several choices one arrives, and without its logprobs",
        [
            f"{CLIENT}::test_several_choices",
            f"{CLIENT}::test_several_choices_streamed",
            f"{CLIENT}::test_logprobs",
            f"{STREAMS}::test_every_form_passes_as_it_is_and_is_understood",
        ],
    ),
    14: Case(
        "requests that read no cache are promised hits",
        [
            f"{BODIES}::test_a_request_that_reads_no_cache_is_promised_nothing",
            f"{REQUESTS}::test_requests_that_read_no_cache",
            "loadtest/traces/test_texts.py::test_what_engines_compute_whole_hits_nothing",
        ],
    ),
    16: Case(
        "a prompt with an image matches nothing, or another image's blocks",
        [
            f"{BODIES}::test_text_before_an_image_is_found_whatever_the_image",
            f"{EVENTS_END}::test_an_image_divides_from_its_block_on",
            "cachecore/prompts/test_template.py::test_what_comes_before_an_image_is_certain",
            f"{CLIENT}::test_an_image_does_not_count_against_a_workers_parity",
        ],
    ),
    17: Case(
        "parts of unknown types are dropped, or what the engine says of them is cut short",
        [f"{BODIES}::test_parts_of_unknown_types_pass_and_so_does_what_the_engine_says_of_them"],
    ),
    19: Case(
        "options of streams on what is no stream",
        [
            f"{END}/test_usage.py::test_whole_answers_are_not_asked",
            f"{BODIES}::test_options_of_streams_are_neither_added_nor_lost",
            f"{REQUESTS}::test_a_prefill_asks_for_one_token_of_the_same_prompt",
        ],
    ),
    20: Case(
        "a server library's own limit on bodies",
        [
            f"{CLIENT}::test_a_body_of_five_megabytes_arrives_whole",
            f"{CLIENT}::test_a_body_over_the_limit_is_refused",
            f"{SERVER}::test_bodies_are_bounded",
            f"{SERVER}::test_chunked_bodies_are_bounded",
            f"{SERVER}::test_a_refused_sender_gets_to_read_why",
            "gateway/test_config.py::test_defaults",
            "workers/openai/test_api.py::test_a_body_of_five_megabytes",
        ],
    ),
    # ---- event streams ----
    22: Case(
        "events are cut where nobody expects it: by comments, line ends, lines of data, bytes of a character",
        [
            f"{STREAMS}::test_every_form_passes_as_it_is_and_is_understood",
            f"{STREAMS}::test_nothing_but_the_usage_alone_is_taken_out",
            f"{USAGE}::test_an_object_cut_into_two_chunks",
            f"{USAGE}::test_an_object_in_two_lines_of_data",
            f"{EXCHANGE}::test_chunks_that_come_byte_by_byte",
        ],
    ),
    23: Case(
        "several events in one read",
        [f"{STREAMS}::test_every_form_passes_as_it_is_and_is_understood", f"{USAGE}::test_streams"],
    ),
    25: Case(
        "events in other spellings are not seen",
        [
            f"{STREAMS}::test_every_form_passes_as_it_is_and_is_understood",
            f"{USAGE}::test_lines_of_other_spellings",
            f"{USAGE}::test_streams",
        ],
    ),
    26: Case(
        "to take one event out spoils its neighbours",
        [
            f"{USAGE}::test_wherever_the_stream_is_cut",
            f"{USAGE}::test_everything_else_passes_as_it_is",
            f"{STRIPPING}::test_usage_is_taken_out_and_still_accounted_for",
            f"{STREAMS}::test_nothing_but_the_usage_alone_is_taken_out",
        ],
    ),
    28: Case(
        "chunks without choices, without a delta, without usage",
        [
            f"{STREAMS}::test_every_form_passes_as_it_is_and_is_understood",
            f"{FIRST_TOKEN}::test_what_took_no_computing_is_no_token",
            f"{LOADTEST}/test_events.py::test_chunks_of_every_form_are_read",
        ],
    ),
    29: Case(
        "a failure before the first byte becomes an empty answer",
        [
            f"{EXCHANGE}::test_no_worker_can_be_reached",
            f"{EXCHANGE}::test_what_is_not_http_is_a_502",
            f"{EXCHANGE}::test_compressed_errors_pass_untouched",
            f"{EXCHANGE}::test_a_stream_that_breaks_between_events_says_so",
            f"{STREAMS}::test_an_answer_of_nothing_is_none",
            f"{FAILURES}::test_an_engines_own_error_is_passed_on",
            f"{EDGE}/test_retries.py::test_if_nobody_else_is_left_its_own_answer_is_passed_on",
        ],
    ),
    31: Case(
        "a worker that dies midway leaves a short answer that looks whole",
        [
            f"{EXCHANGE}::test_a_stream_that_breaks_between_events_says_so",
            f"{EXCHANGE}::test_a_stream_that_breaks_elsewhere_is_aborted",
            f"{EXCHANGE}::test_an_answer_that_breaks_is_aborted",
            f"{EXCHANGE}::test_a_broken_answer_is_no_short_answer_to_http10",
            f"{STREAMS}::test_what_ends_with_its_connection_and_not_by_itself_was_cut_off",
            f"{FAILURES}::test_a_worker_that_dies_in_a_stream_ends_it_with_an_error",
            f"{FAILURES}::test_a_stream_whose_workers_process_is_killed_ends_with_an_error",
        ],
    ),
    32: Case(
        "reasons to finish that the reader does not know",
        [
            f"{STREAMS}::test_every_form_passes_as_it_is_and_is_understood",
            f"{LOADTEST}/test_events.py::test_chunks_of_every_form_are_read",
        ],
    ),
    34: Case(
        "streams are buffered on their way",
        [
            f"{STREAMS}::test_an_event_is_out_before_the_next_one_is_made",
            f"{EXCHANGE}::test_event_streams_are_not_to_be_buffered",
            f"{EXCHANGE}::test_a_stream_reaches_http10_as_it_comes",
            f"{BODIES}::test_headers_travel_alike_on_every_route",
        ],
    ),
    35: Case(
        "a retry after the first byte says the beginning twice",
        [
            f"{EXCHANGE}::test_a_stream_that_breaks_between_events_says_so",
            f"{EXCHANGE}::test_a_worker_that_dies_unanswered_is_replaced",
            f"{EXCHANGE}::test_attempts_are_bounded",
        ],
    ),
    # ---- clients that leave, deadlines, connections ----
    37: Case(
        "nobody waits for an answer any more, and the engine goes on computing it",
        [
            f"{FAILURES}::test_a_client_that_leaves_is_gone_at_the_worker_too",
            f"{EXCHANGE}::test_the_worker_learns_that_the_client_left",
            f"{EXCHANGE}::test_a_half_closed_client_gets_its_answer",
            f"{EXCHANGE}::test_a_half_closed_client_gets_its_stream",
            f"{EXCHANGE}::test_a_client_may_leave_while_we_connect",
            f"{EXCHANGE}::test_a_client_may_leave_while_we_decide",
            "gateway/test_admission.py::test_who_leaves_frees_its_place_at_once_and_is_never_served",
        ],
    ),
    38: Case(
        "retries of impatient clients pile up at the workers",
        [
            f"{MANY}::test_retries_of_impatient_clients_do_not_pile_up",
            f"{MANY}::test_a_request_that_is_tried_elsewhere_is_at_one_worker_at_a_time",
            f"{FAILURES}::test_impatient_clients_have_one_request_each_at_the_worker",
            f"{EXCHANGE}::test_stale_connections_are_not_tried_one_by_one",
            f"{RELIABILITY}::test_without_a_budget_nothing_is_tried_elsewhere",
            f"{RELIABILITY}::test_under_whom_two_workers_have_died_no_third_is_asked",
            f"{HEDGING}::test_never_more_than_two_at_once",
            "policies/state/test_attempts.py::test_a_storm_of_failures_costs_a_share_of_the_load_and_no_more",
        ],
    ),
    40: Case(
        "a client leaves within a stream, also while nobody reads it",
        [
            f"{EXCHANGE}::test_the_worker_learns_that_the_client_left",
            f"{FAILURES}::test_a_client_that_leaves_is_gone_at_the_worker_too",
            f"{SERVER}::test_many_clients_leave_nothing_behind",
        ],
    ),
    41: Case(
        "a library's total time-out ends long streams that are well",
        [
            f"{EXCHANGE}::test_a_slow_but_steady_stream_outlives_the_deadlines",
            f"{EXCHANGE}::test_a_stream_that_falls_silent",
            f"{EXCHANGE}::test_an_answer_that_falls_silent",
            f"{EXCHANGE}::test_a_worker_that_never_answers",
            f"{RELIABILITY}::test_a_request_has_the_time_it_asks_for",
            f"{RELIABILITY}::test_time_runs_while_a_request_waits_for_its_turn",
        ],
    ),
    43: Case(
        "a library's own limit on connections, behind which the next one waits unseen",
        [
            f"{MANY}::test_a_worker_sees_all_streams_at_once",
            f"{MEMBERS}::test_a_worker_is_probed_however_many_do_not_answer",
        ],
    ),
    44: Case(
        "hundreds of requests to one host, and connections that are made anew for each",
        [
            f"{MANY}::test_a_worker_sees_all_streams_at_once",
            f"{MANY}::test_connections_are_used_again_by_whoever_comes",
            f"{END}/test_admission.py::test_a_flood_is_told_so_and_the_quiet_tenant_is_served",
        ],
    ),
    46: Case(
        "connections that are used again, old versions of HTTP, and more clients than there is room for",
        [
            f"{SERVER}::test_eight_requests_on_four_connections",
            f"{SERVER}::test_apachebench",
            f"{SERVER}::test_pipelined_messages_are_answered_in_order",
            f"{SERVER}::test_connections_are_bounded",
            f"{MANY}::test_a_worker_sees_all_streams_at_once",
            f"{EXCHANGE}::test_http10_persists_on_request",
        ],
    ),
    # ---- HTTP ----
    47: Case(
        "the worker's framing on an answer that is framed anew",
        [
            f"{EXCHANGE}::test_an_answer_with_a_length",
            f"{EXCHANGE}::test_chunks_pass_as_they_are",
            f"{EXCHANGE}::test_a_body_that_ends_with_the_connection_is_framed",
            f"{EXCHANGE}::test_statuses_without_a_body",
            f"{EXCHANGE}::test_chunks_are_unpacked_for_http10",
            f"{STRIPPING}::test_usage_is_taken_out_and_still_accounted_for",
        ],
    ),
    49: Case(
        "compressed bytes that are not called so",
        [
            f"{EXCHANGE}::test_compressed_errors_pass_untouched",
            f"{STREAMS}::test_what_a_worker_compresses_is_left_alone",
        ],
    ),
    50: Case(
        "the body of an error is decoded on its way",
        [
            f"{EXCHANGE}::test_compressed_errors_pass_untouched",
            f"{STRIPPING}::test_nothing_is_taken_out_of_other_answers",
        ],
    ),
    52: Case(
        "lengths in characters, and bytes that change on their way",
        [
            f"{BODIES}::test_line_ends_and_wide_characters_stay",
            f"{FIDELITY}::test_every_unknown_field_arrives_byte_for_byte",
            f"{FIDELITY}::test_headers_that_belong_to_the_connection_do_not_travel",
        ],
    ),
    53: Case(
        "headers of one connection travel on; bodies in chunks and errors without a frame",
        [
            f"{EXCHANGE}::test_hop_by_hop_headers_of_a_worker_stay_behind",
            f"{FIDELITY}::test_headers_that_belong_to_the_connection_do_not_travel",
            f"{SERVER}::test_chunked_requests",
            f"{SERVER}::test_an_upgrade_is_declined",
            f"{SERVER}::test_what_follows_a_malformed_head_is_not_read",
            f"{EDGE}/test_http1.py::test_hop_by_hop_headers_stay_behind",
        ],
    ),
    55: Case(
        "models are listed without what their workers say of them",
        [
            f"{MEMBERS}::test_models_are_the_union_of_the_workers_with_every_field",
            f"{BODIES}::test_ids_of_models_may_have_slashes",
            f"{CLIENT}::test_models_are_listed_and_retrieved",
        ],
    ),
    56: Case(
        "the client's own host is asked of the worker",
        [
            f"{BODIES}::test_headers_travel_alike_on_every_route",
            f"{FIDELITY}::test_headers_that_belong_to_the_connection_do_not_travel",
            f"{BODIES}::test_workers_are_told_who_asks_where_that_is_wanted",
            f"{BODIES}::test_what_a_proxy_has_said_of_a_client_stays",
        ],
        "X-Forwarded-* is added where `x_forwarded` is set: no engine needs it, and it brings addresses into logs.",
    ),
    # ---- keys, ids and headers ----
    58: Case(
        "one route treats headers otherwise than the others",
        [
            f"{BODIES}::test_headers_travel_alike_on_every_route",
            f"{REQUESTS}::test_the_model_of_a_form",
            f"{END}/test_tenants.py::test_a_tenants_key_does_not_reach_the_worker",
        ],
    ),
    59: Case(
        "a client's id is used for two requests at once",
        [
            f"{REQUESTS}::test_upstream_ids_are_unique",
            f"{FIDELITY}::test_the_client_gets_its_request_id_and_the_worker_a_unique_one",
            f"{FIDELITY}::test_a_request_id_in_the_body_is_replaced_by_the_unique_one",
        ],
    ),
    61: Case(
        "a client writes into the log, or as much as it likes into headers",
        [
            f"{BODIES}::test_clients_write_no_lines_into_the_log",
            f"{REQUESTS}::test_an_unsafe_id_is_replaced",
            f"{SERVER}::test_heads_are_bounded",
            f"{SERVER}::test_what_follows_a_malformed_head_is_not_read",
            f"{EDGE}/test_http1.py::test_a_head_holds_so_many_headers",
        ],
    ),
}
