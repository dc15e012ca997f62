/* policies.native._deciding: what a request costs on each candidate, in one call. Its twins are `python_weigh` and
 * `python_tied` of policies/pricing.py, which say what is right: the same sums in the same order, so the same floats.
 *
 * Records are read where Python keeps their slots. That holds for the very classes that `learn` was shown, and for
 * numbers of the usual kinds: of anything else these functions make nothing, and say so by answering None. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>

enum view_slot { LOAD, PREFILL, MATCHED, CONFIRMED, EVIDENCE, CAPACITY, VIEW_SLOTS };
enum load_slot {
    INFLIGHT, WAITING, OUTSTANDING, CONTEXT, PLACED, KV_TOKENS, KV_PRESSURE, BACKLOG_ENDS_AT, WAIT_MIN, FOREIGN,
    FOREIGN_UNTIL, REQUESTS_AT_ONCE, SLOT_SECONDS, LOAD_SLOTS
};
enum model_slot { BASE, TOKEN, QUADRATIC, DECODING, DECODING_TOKEN, MODEL_SLOTS };

static const char *const view_names[VIEW_SLOTS] = {
    "load", "prefill", "matched_tokens", "confirmed_tokens", "evidence", "capacity_requests"};
static const char *const load_names[LOAD_SLOTS] = {
    "inflight", "waiting", "outstanding_prefill_seconds", "running_context_tokens", "placed", "kv_tokens",
    "_kv_pressure", "_backlog_ends_at", "_wait_seconds_min", "_foreign", "_foreign_until", "capacity_requests",
    "slot_seconds"};
static const char *const model_names[MODEL_SLOTS] = {
    "_base", "_token", "_quadratic", "_decoding", "_decoding_token"};

typedef struct {
    PyObject *type;
    Py_ssize_t offsets[LOAD_SLOTS];
} layout;

#define EVIDENCES 4

typedef struct {
    layout view, load, model;
    PyObject *evidences[EVIDENCES]; /* the first is that of confirmed matches */
    double credits[EVIDENCES];
    double slack_requests, pressure_min, tie_share, tie_seconds;
    PyObject *kv_pressure;
} known;

/* Candidate by candidate, what is summed over. */
typedef struct {
    double wait, work, placed;
    long inflight;
} figures;

static PyObject *slot(const layout *of, PyObject *record, int number)
{
    return *(PyObject **)((char *)record + of->offsets[number]);
}

/* 0, or -1 for what is no plain number. */
static int to_double(PyObject *value, double *number)
{
    if (value == NULL)
        return -1;
    if (PyFloat_CheckExact(value)) {
        *number = PyFloat_AS_DOUBLE(value);
        return 0;
    }
    if (!PyLong_CheckExact(value))
        return -1;
    *number = PyLong_AsDouble(value);
    if (*number == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        return -1;
    }
    return 0;
}

static int to_long(PyObject *value, long *number)
{
    int overflow = 0;
    if (value == NULL || !PyLong_CheckExact(value))
        return -1;
    *number = PyLong_AsLongAndOverflow(value, &overflow);
    return overflow ? -1 : 0;
}

/* `WorkerAccount.wait_seconds`. */
static int wait_of(const known *state, PyObject *load, double now, long inflight, double *wait)
{
    const layout *of = &state->load;
    long waiting, capacity, foreign;
    *wait = 0.0;
    if (to_long(slot(of, load, WAITING), &waiting) || to_long(slot(of, load, REQUESTS_AT_ONCE), &capacity))
        return -1;
    if (waiting) {
        double ends_at, outstanding, least;
        if (to_double(slot(of, load, BACKLOG_ENDS_AT), &ends_at) || to_double(slot(of, load, WAIT_MIN), &least)
            || to_double(slot(of, load, OUTSTANDING), &outstanding))
            return -1;
        *wait = ends_at - now;
        if (*wait >= outstanding)
            *wait = outstanding;
        else if (*wait < least)
            *wait = least;
    }
    if (!capacity)
        return 0;
    if (to_long(slot(of, load, FOREIGN), &foreign))
        return -1;
    if (inflight + foreign >= capacity) {
        double until, slot_seconds, crowding = 1.0;
        if (to_double(slot(of, load, FOREIGN_UNTIL), &until) || to_double(slot(of, load, SLOT_SECONDS), &slot_seconds))
            return -1;
        long excess = inflight + (now >= until ? 0 : foreign) + 1 - capacity;
        if (excess > 0)
            crowding = 1.0 + (double)excess / (double)capacity;
        double held = slot_seconds * (crowding - 1.0);
        if (held > *wait)
            *wait = held;
    }
    return 0;
}

/* `credited_tokens`: tokens of the prompt to count on. */
static int cached_of(const known *state, PyObject *view, long *cached)
{
    const layout *of = &state->view;
    if (to_long(slot(of, view, MATCHED), cached))
        return -1;
    PyObject *evidence = slot(of, view, EVIDENCE);
    if (*cached == 0 || evidence == state->evidences[0])
        return 0;
    long confirmed;
    if (to_long(slot(of, view, CONFIRMED), &confirmed))
        return -1;
    for (int number = 1; number < EVIDENCES; number++)
        if (evidence == state->evidences[number]) {
            *cached = confirmed + (long)(state->credits[number] * (double)(*cached - confirmed));
            return 0;
        }
    return -1;
}

/* `PrefillModel.prefill_seconds`. */
static int work_of(const known *state, PyObject *model, PyObject *load, long prompt, long cached, double *seconds)
{
    double base, token, quadratic, tokens = (double)(prompt - cached);
    long decoding;
    const layout *of = &state->model;
    if (to_double(slot(of, model, BASE), &base) || to_double(slot(of, model, TOKEN), &token)
        || to_double(slot(of, model, QUADRATIC), &quadratic) || to_long(slot(&state->load, load, CONTEXT), &decoding))
        return -1;
    *seconds = base + tokens * (token + quadratic * ((double)cached + 0.5 * tokens));
    if (decoding) {
        double each, each_token;
        if (to_double(slot(of, model, DECODING), &each) || to_double(slot(of, model, DECODING_TOKEN), &each_token))
            return -1;
        *seconds += (double)decoding * (each + each_token * tokens);
    }
    return 0;
}

/* The candidate's part in `kv_price`: 1 where the price is settled, with `least` at nothing. -1 may leave an error. */
static int pressure_of(const known *state, PyObject *load, double *least)
{
    long tokens;
    double pressure;
    if (to_long(slot(&state->load, load, KV_TOKENS), &tokens))
        return -1;
    if (tokens == 0)
        return 0;
    PyObject *kept = slot(&state->load, load, KV_PRESSURE);
    if (kept == Py_None) {
        PyObject *computed = PyObject_CallMethodNoArgs(load, state->kv_pressure);
        if (computed == NULL)
            return -1;
        int failed = to_double(computed, &pressure);
        Py_DECREF(computed);
        if (failed)
            return -1;
    } else if (to_double(kept, &pressure))
        return -1;
    if (pressure < state->pressure_min) {
        *least = 0.0;
        return 1;
    }
    if (pressure < *least || *least == 0.0)
        *least = pressure;
    return 0;
}

typedef struct {
    double arrivals_per_second, utilisation, arrivals, tau, unit;
} fleet_rates;

/* `work_price`. */
static double price_of_work(const fleet_rates *rates, double wait_min, int pulled)
{
    if (rates->arrivals_per_second <= 0.0)
        return 0.0;
    double rho = rates->utilisation < 1.0 ? rates->utilisation : 1.0;
    double price = pulled ? rho * rho : rho * rho / (1.0 - rho + 1.0 / rates->arrivals);
    if (wait_min > 0.0)
        price += rates->arrivals_per_second * wait_min / (1.0 - rho + wait_min / rates->tau);
    return price;
}

static PyObject *floats(const figures *each, Py_ssize_t count, size_t offset)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t place = 0; list != NULL && place < count; place++) {
        PyObject *value = PyFloat_FromDouble(*(const double *)((const char *)&each[place] + offset));
        if (value == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, place, value);
    }
    return list;
}

/* Whether all are views with records of the classes that `learn` was shown. */
static int are_known(const known *state, PyObject *workers)
{
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(workers); place++) {
        PyObject *view = PyList_GET_ITEM(workers, place);
        if ((PyObject *)Py_TYPE(view) != state->view.type)
            return 0;
        PyObject *load = slot(&state->view, view, LOAD), *model = slot(&state->view, view, PREFILL);
        if (load == NULL || model == NULL || (PyObject *)Py_TYPE(load) != state->load.type
            || (PyObject *)Py_TYPE(model) != state->model.type)
            return 0;
    }
    return 1;
}

static int read_rates(PyObject *rates, fleet_rates *read)
{
    double *fields = (double *)read;
    for (int number = 0; number < 5; number++)
        if (to_double(PyTuple_GET_ITEM(rates, number), &fields[number]))
            return -1;
    return 0;
}

/* Fills `each`, and `*price` with what a second of work costs others: 0, or -1, maybe with an error. */
static int measure(
    const known *state, long prompt, PyObject *workers, double now, const fleet_rates *rates, int pulled, figures *each,
    double *price)
{
    double wait_min = INFINITY, pressure = 0.0;
    long slots = 0, with_slots = 0, taken = 0;
    int settled = 0;
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(workers); place++) {
        PyObject *view = PyList_GET_ITEM(workers, place);
        PyObject *load = slot(&state->view, view, LOAD), *model = slot(&state->view, view, PREFILL);
        figures *one = &each[place];
        long cached, capacity;
        if (to_long(slot(&state->load, load, INFLIGHT), &one->inflight)
            || to_double(slot(&state->load, load, PLACED), &one->placed) || cached_of(state, view, &cached)
            || wait_of(state, load, now, one->inflight, &one->wait)
            || work_of(state, model, load, prompt, cached, &one->work)
            || to_long(slot(&state->view, view, CAPACITY), &capacity))
            return -1;
        if (one->wait < wait_min)
            wait_min = one->wait;
        if (!settled && (settled = pressure_of(state, load, &pressure)) < 0)
            return -1;
        if (capacity) {
            with_slots++;
            slots += capacity;
            taken += one->inflight;
        }
    }
    double of_work = price_of_work(rates, wait_min, pulled) + pressure, of_slots = 0.0;
    if (taken) { /* `slot_price` */
        double rho = taken < slots ? (double)taken / (double)slots : 1.0;
        double all = (double)slots;
        of_slots = pow(rho, sqrt(2.0 * (all / (double)with_slots + 1.0))) / (1.0 - rho + 1.0 / all);
    }
    *price = of_work > of_slots ? of_work : of_slots;
    return 0;
}

/* `crowding_each`, and what it makes of each cost: in place of what was placed there. */
static void add_up(const known *state, const fleet_rates *rates, double price, figures *each, Py_ssize_t count)
{
    double slack = rates->arrivals_per_second > 0.0
                       ? state->slack_requests * rates->unit * rates->utilisation / rates->arrivals_per_second
                       : 0.0;
    double least = each[0].placed, weight = 1.0 + price;
    for (Py_ssize_t place = 1; place < count; place++)
        if (each[place].placed < least)
            least = each[place].placed;
    double base = slack + least;
    for (Py_ssize_t place = 0; place < count; place++) {
        double crowding = 1.0;
        if (base > 0.0) {
            double ratio = (slack + each[place].placed) / base, most = 1.0 + (double)each[place].inflight;
            crowding = ratio < most ? ratio : most;
        }
        each[place].placed = each[place].wait + weight * crowding * each[place].work;
    }
}

#define FEW 64

static PyObject *weigh(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const known *state = PyModule_GetState(module);
    if (count != 5 || !PyTuple_Check(args[3]) || PyTuple_GET_SIZE(args[3]) != 5) {
        PyErr_SetString(PyExc_TypeError, "weigh(prompt_tokens, workers, now, rates, pulled)");
        return NULL;
    }
    PyObject *workers = args[1], *answer = NULL;
    Py_ssize_t size = PyList_CheckExact(workers) ? PyList_GET_SIZE(workers) : 0;
    long prompt;
    double now, price;
    fleet_rates rates;
    if (state->view.type == NULL || size == 0 || to_long(args[0], &prompt) || to_double(args[2], &now)
        || read_rates(args[3], &rates) || !are_known(state, workers))
        Py_RETURN_NONE;
    figures few[FEW], *each = size <= FEW ? few : PyMem_New(figures, size);
    if (each == NULL)
        return PyErr_NoMemory();
    if (measure(state, prompt, workers, now, &rates, args[4] == Py_True, each, &price)) {
        answer = PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        goto done;
    }
    add_up(state, &rates, price, each, size);
    PyObject *waits = floats(each, size, offsetof(figures, wait)), *works = floats(each, size, offsetof(figures, work));
    PyObject *costs = floats(each, size, offsetof(figures, placed));
    if (waits != NULL && works != NULL && costs != NULL)
        answer = PyTuple_Pack(3, waits, works, costs);
    Py_XDECREF(waits);
    Py_XDECREF(works);
    Py_XDECREF(costs);
done:
    if (each != few)
        PyMem_Free(each);
    return answer;
}

static PyObject *tied(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const known *state = PyModule_GetState(module);
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "tied(workers, costs)");
        return NULL;
    }
    PyObject *workers = args[0], *costs = args[1];
    Py_ssize_t size = PyList_CheckExact(workers) && PyList_CheckExact(costs) ? PyList_GET_SIZE(workers) : 0, best = 0;
    double least = INFINITY, cost;
    long most, matched;
    if (state->view.type == NULL || size == 0 || PyList_GET_SIZE(costs) != size)
        Py_RETURN_NONE;
    for (Py_ssize_t place = 0; place < size; place++) {
        if ((PyObject *)Py_TYPE(PyList_GET_ITEM(workers, place)) != state->view.type
            || to_double(PyList_GET_ITEM(costs, place), &cost))
            Py_RETURN_NONE;
        if (cost < least) {
            least = cost;
            best = place;
        }
    }
    double limit = least * (1.0 + state->tie_share) + state->tie_seconds;
    if (to_long(slot(&state->view, PyList_GET_ITEM(workers, best), MATCHED), &most))
        Py_RETURN_NONE;
    PyObject *places = PyList_New(0);
    for (Py_ssize_t place = 0; places != NULL && place < size; place++) {
        if (to_double(PyList_GET_ITEM(costs, place), &cost)
            || to_long(slot(&state->view, PyList_GET_ITEM(workers, place), MATCHED), &matched)) {
            Py_DECREF(places);
            Py_RETURN_NONE;
        }
        if (cost > limit || matched < most)
            continue;
        PyObject *number = PyLong_FromSsize_t(place);
        if (number == NULL || PyList_Append(places, number))
            Py_CLEAR(places);
        Py_XDECREF(number);
    }
    return places;
}

/* Where a class keeps its slots: 0, or -1 with an error. */
static int lay_out(layout *of, PyObject *type, const char *const *slots, int count)
{
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "not a class");
        return -1;
    }
    for (int number = 0; number < count; number++) {
        PyObject *found = PyObject_GetAttrString(type, slots[number]);
        if (found == NULL)
            return -1;
        const PyMemberDef *member =
            Py_IS_TYPE(found, &PyMemberDescr_Type) ? ((PyMemberDescrObject *)found)->d_member : NULL;
        if (member == NULL || member->type != T_OBJECT_EX) {
            PyErr_Format(PyExc_TypeError, "%s of %R is no slot", slots[number], type);
            Py_DECREF(found);
            return -1;
        }
        of->offsets[number] = member->offset;
        Py_DECREF(found);
    }
    Py_XSETREF(of->type, Py_NewRef(type));
    return 0;
}

static PyObject *learn(PyObject *module, PyObject *args)
{
    known *state = PyModule_GetState(module);
    PyObject *view, *load, *model, *credits;
    double slack_requests, pressure_min, tie_share, tie_seconds;
    if (!PyArg_ParseTuple(
            args, "OOOO!dddd:learn", &view, &load, &model, &PyDict_Type, &credits, &slack_requests, &pressure_min,
            &tie_share, &tie_seconds))
        return NULL;
    if (PyDict_GET_SIZE(credits) != EVIDENCES) {
        PyErr_Format(PyExc_ValueError, "credits of %d kinds of evidence are needed", EVIDENCES);
        return NULL;
    }
    Py_ssize_t position = 0;
    PyObject *evidence, *credit;
    for (int number = 0; PyDict_Next(credits, &position, &evidence, &credit); number++) {
        state->credits[number] = PyFloat_AsDouble(credit);
        if (PyErr_Occurred())
            return NULL;
        Py_XSETREF(state->evidences[number], Py_NewRef(evidence));
    }
    if (lay_out(&state->load, load, load_names, LOAD_SLOTS) || lay_out(&state->model, model, model_names, MODEL_SLOTS)
        || lay_out(&state->view, view, view_names, VIEW_SLOTS))
        return NULL;
    state->slack_requests = slack_requests;
    state->pressure_min = pressure_min;
    state->tie_share = tie_share;
    state->tie_seconds = tie_seconds;
    Py_RETURN_NONE;
}

static int traverse(PyObject *module, visitproc visit, void *arg)
{
    known *state = PyModule_GetState(module);
    Py_VISIT(state->view.type);
    Py_VISIT(state->load.type);
    Py_VISIT(state->model.type);
    for (int number = 0; number < EVIDENCES; number++)
        Py_VISIT(state->evidences[number]);
    return 0;
}

static int clear(PyObject *module)
{
    known *state = PyModule_GetState(module);
    Py_CLEAR(state->view.type);
    Py_CLEAR(state->load.type);
    Py_CLEAR(state->model.type);
    for (int number = 0; number < EVIDENCES; number++)
        Py_CLEAR(state->evidences[number]);
    Py_CLEAR(state->kv_pressure);
    return 0;
}

static int begin(PyObject *module)
{
    known *state = PyModule_GetState(module);
    const char *wish = getenv("ROPEWAY_NATIVE");
    if (wish != NULL && strcmp(wish, "0") == 0) {
        PyErr_SetString(PyExc_ImportError, "ROPEWAY_NATIVE=0");
        return -1;
    }
    state->kv_pressure = PyUnicode_InternFromString("kv_pressure");
    return state->kv_pressure == NULL ? -1 : 0;
}

static PyMethodDef methods[] = {
    {"learn", learn, METH_VARARGS, "The classes of views, loads and models, and the numbers that are chosen."},
    {"weigh", (PyCFunction)(void (*)(void))weigh, METH_FASTCALL, "Waits, works and costs of all candidates, or None."},
    {"tied", (PyCFunction)(void (*)(void))tied, METH_FASTCALL, "Places of the cheapest candidates, or None."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, begin}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "policies.native._deciding",
    .m_size = sizeof(known),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
};

PyMODINIT_FUNC PyInit__deciding(void)
{
    return PyModuleDef_Init(&definition);
}
