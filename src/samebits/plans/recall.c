/* Products of modules that were made before, made once more: see recall.py, which says what is remembered and when.

   Everything is asked of torch again by the means of Python, in the order of packed_module.py, together.py, call.py and
   products.py, and nothing is decided here: where anything is not as remembered, the answer is None and those do it. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PRODUCTS = 4, MAX_PREFETCHED = 8, MAX_OUTPUTS = MAX_PRODUCTS + MAX_PREFETCHED };
enum { MAX_ARGUMENTS = 4, MAX_LAUNCHES = 3, MAX_PATCHES = 96, MAX_ROOM = 8192 };
enum { SAMPLE = 61 }; /* of so many unplanned products one is made as usual: their number may have stopped changing */
enum { SAME = 1, OTHER = 0, FAILED = -1 };

typedef int (*Start)(const void *config, void *function, void **arguments, void **extra); /* cuLaunchKernelEx */

typedef struct {
    uint32_t offset;
    uint32_t source; /* 0: x, then the outputs, then experts' indices if there are any, then the scratch */
    int64_t addend;
} Patch;

typedef struct {
    void *config, *function;
    int count;
    uint32_t offsets[MAX_ARGUMENTS];
} Launch;

typedef struct {
    PyObject_HEAD /* allocations, scratch: what empty is asked, where no scratch is needed None; ids: of experts, or None */
    PyObject *strides, *state, *where, *bias, *ids, *group, *others, *plans, *prefetched, *allocations, *scratch, *failed, *finish, *kept;
    long device;
    int joins, products, outputs, patch_count, launch_count; /* outputs: products, then what is prefetched */
    Start start;
    char *room; /* what the kernels are told, but for the addresses of a call */
    size_t room_bytes;
    Patch patches[MAX_PATCHES];
    Launch launches[MAX_LAUNCHES];
} Shortcut;

typedef struct {
    PyObject_HEAD
    PyObject *turns, *residents, *tensor, *parameter, *dtype, *exchange_device, *restore_device, *current_stream, *is_capturing;
    PyObject *autocasts, *casts, *forward_ad, *interpreter, *modes, *tracing, *is_grad_enabled, *environment, *getters, *linear;
    PyObject *observers, *is_observed, *empty;
    long long few_tokens; /* with no more, plans are looked for at once */
    unsigned unplanned;   /* products so far without a plan, of weights whose number of tokens changes from call to call */
} Recall;

/* Names of attributes, made when the module is. */
#define NAMES(X) \
    X(shape) X(stride) X(dtype) X(get_device) X(data_ptr) X(requires_grad) X(_version) X(_tensor) \
    X(untyped_storage) X(_cdata) X(_storage) X(cdata) \
    X(_address) X(last) X(made) X(where) X(state) X(first) X(others) X(unwanted) X(data) X(bias) X(is_proved) X(shortcuts) X(training) \
    X(_current_level) X(_last) X(cuda) X(windows) X(prefetched) X(is_changing) X(planned)
#define DECLARE(name) static PyObject *name_##name;
NAMES(DECLARE)
#undef DECLARE

static PyTypeObject *shortcut_type;

/* -- Shortcut ------------------------------------------------------------------------------------------------------ */

/* Gives up the references from one field to another, and the object. */
static void give_up(PyObject *self, PyObject **first, PyObject **last) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    for (PyObject **each = first; each <= last; each++) Py_CLEAR(*each);
    release(self);
    Py_DECREF(type);
}

static void shortcut_dealloc(PyObject *self) {
    Shortcut *own = (Shortcut *)self;
    free(own->room);
    give_up(self, &own->strides, &own->kept);
}

static int read_patches(Shortcut *self, PyObject *patches, Py_ssize_t room_bytes) {
    Py_ssize_t count = PyTuple_Size(patches);
    if (count < 0 || count > MAX_PATCHES) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned int offset, source;
        long long addend;
        if (!PyArg_ParseTuple(PyTuple_GetItem(patches, i), "IIL", &offset, &source, &addend)) return 0;
        if ((Py_ssize_t)offset + 8 > room_bytes || source > (unsigned)self->outputs + (self->ids != Py_None) + (self->scratch != Py_None)) return 0;
        self->patches[i] = (Patch){offset, source, addend};
    }
    self->patch_count = (int)count;
    return 1;
}

static int read_launches(Shortcut *self, PyObject *launches, Py_ssize_t room_bytes) {
    Py_ssize_t count = PyTuple_Size(launches);
    if (count < 1 || count > MAX_LAUNCHES) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long long config, function;
        PyObject *offsets;
        Launch *launch = &self->launches[i];
        if (!PyArg_ParseTuple(PyTuple_GetItem(launches, i), "KKO!", &config, &function, &PyTuple_Type, &offsets)) return 0;
        Py_ssize_t arguments = PyTuple_Size(offsets);
        if (arguments < 1 || arguments > MAX_ARGUMENTS) return 0;
        for (Py_ssize_t j = 0; j < arguments; j++) {
            long offset = PyLong_AsLong(PyTuple_GetItem(offsets, j));
            if (offset < 0 || offset >= room_bytes) return 0;
            launch->offsets[j] = (uint32_t)offset;
        }
        launch->config = (void *)(uintptr_t)config, launch->function = (void *)(uintptr_t)function;
        launch->count = (int)arguments;
    }
    self->launch_count = (int)count;
    return 1;
}

static PyObject *shortcut_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"device", "strides", "state", "where", "bias", "ids", "joins", "group", "others", "plans", "prefetched",
                            "allocations", "scratch", "room", "patches", "launches", "start", "failed", "finish", "kept", NULL};
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Shortcut *self = (Shortcut *)allocate(type, 0);
    PyObject *patches, *launches;
    const char *room;
    Py_ssize_t room_bytes;
    unsigned long long start;
    if (!self) return NULL;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "lO!OO!OOpOO!O!O!O!Oy#O!O!KOOO", names, &self->device, &PyTuple_Type, &self->strides, &self->state,
            &PyTuple_Type, &self->where, &self->bias, &self->ids, &self->joins, &self->group, &PyTuple_Type, &self->others,
            &PyTuple_Type, &self->plans, &PyTuple_Type, &self->prefetched, &PyTuple_Type, &self->allocations, &self->scratch, &room,
            &room_bytes, &PyTuple_Type, &patches, &PyTuple_Type, &launches, &start, &self->failed, &self->finish, &self->kept)) {
        for (PyObject **each = &self->strides; each <= &self->kept; each++) *each = NULL; /* nothing is held yet */
        Py_DECREF(self);
        return NULL;
    }
    for (PyObject **each = &self->strides; each <= &self->kept; each++) Py_INCREF(*each);
    Py_ssize_t outputs = PyTuple_Size(self->allocations), others = PyTuple_Size(self->others), prefetched = PyTuple_Size(self->prefetched);
    self->products = (int)others + 1, self->outputs = (int)outputs, self->start = (Start)(uintptr_t)start;
    int fits = others < MAX_PRODUCTS && prefetched <= MAX_PREFETCHED && outputs == 1 + others + prefetched &&
               PyTuple_Size(self->plans) == others && PyTuple_Size(self->where) == 2 && self->start && room_bytes <= MAX_ROOM;
    for (Py_ssize_t i = 0; i < outputs && fits; i++) fits = PyTuple_Check(PyTuple_GetItem(self->allocations, i));
    fits = fits && (self->scratch == Py_None || PyTuple_Check(self->scratch));
    if (fits && self->ids != Py_None) fits = PyTuple_Check(self->ids) && PyTuple_Size(self->ids) == 3;
    if (!fits || !read_patches(self, patches, room_bytes) || !read_launches(self, launches, room_bytes)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "not the fields of a shortcut");
        Py_DECREF(self);
        return NULL;
    }
    self->room = malloc((size_t)room_bytes);
    if (!self->room) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    memcpy(self->room, room, (size_t)room_bytes);
    self->room_bytes = (size_t)room_bytes;
    return (PyObject *)self;
}

/* -- Questions. SAME, OTHER or FAILED ------------------------------------------------------------------------------ */

static int equals(PyObject *left, PyObject *right) {
    return left == right ? SAME : PyObject_RichCompareBool(left, right, Py_EQ);
}

/* Like equals; takes over a reference to the left, which may be NULL where an error is set. */
static int equals_new(PyObject *left, PyObject *right) {
    if (!left) return FAILED;
    int same = equals(left, right);
    Py_DECREF(left);
    return same;
}

static int attribute_equals(PyObject *object, PyObject *name, PyObject *value) {
    return equals_new(PyObject_GetAttr(object, name), value);
}

/* Whether an attribute, or what a function gives, is true. */
static int is_true_new(PyObject *value) {
    if (!value) return FAILED;
    int truth = PyObject_IsTrue(value);
    Py_DECREF(value);
    return truth;
}

/* Of a weak reference that an attribute is: a new reference to a tensor, or None. */
static PyObject *referent(PyObject *object, PyObject *name) {
    PyObject *reference = PyObject_GetAttr(object, name);
    if (!reference) return NULL;
    PyObject *tensor = PyObject_CallNoArgs(reference);
    Py_DECREF(reference);
    return tensor;
}

static int bytes_are_at(PyObject *bytes, PyObject *version, PyObject *address) {
    int same = attribute_equals(bytes, name__version, version);
    return same == SAME ? attribute_equals(bytes, name__address, address) : same;
}

/* ParameterBytes._storage is the tensor's. */
static int storage_is_of(PyObject *bytes, PyObject *tensor) {
    PyObject *storage = PyObject_CallMethodObjArgs(tensor, name_untyped_storage, NULL);
    PyObject *now = storage ? PyObject_GetAttr(storage, name__cdata) : NULL;
    PyObject *reference = now ? PyObject_GetAttr(bytes, name__storage) : NULL;
    int same = reference ? attribute_equals(reference, name_cdata, now) : FAILED;
    Py_XDECREF(storage), Py_XDECREF(now), Py_XDECREF(reference);
    return same;
}

/* ParameterBytes.now() is tensor. */
static int bytes_are_of(PyObject *bytes, PyObject *tensor) {
    PyObject *made_for = referent(bytes, name__tensor);
    if (!made_for) return FAILED;
    Py_DECREF(made_for);
    if (made_for != tensor) return OTHER; /* which may be an inference tensor, without a version */
    PyObject *version = PyObject_GetAttr(tensor, name__version);
    PyObject *address = version ? PyObject_CallMethodObjArgs(tensor, name_data_ptr, NULL) : NULL;
    int same = address ? bytes_are_at(bytes, version, address) : FAILED;
    Py_XDECREF(version), Py_XDECREF(address);
    return same == SAME ? storage_is_of(bytes, tensor) : same;
}

/* Whether a bias is the one that was remembered; both may be None. */
static int bias_is(PyObject *bytes, PyObject *bias) {
    if (bytes == Py_None || bias == Py_None) return bytes == bias ? SAME : OTHER;
    return bytes_are_of(bytes, bias);
}

/* Whether torch's settings are those of a text that blas_state() gave; asks without making texts. */
static int state_is(Recall *self, PyObject *state) {
    PyObject *last = PyObject_GetAttr(self->environment, name__last);
    if (!last) return FAILED;
    PyObject *values = PyTuple_GetItem(last, 0), *text = PyTuple_GetItem(last, 1);
    Py_ssize_t count = PyTuple_Size(self->getters);
    int same = !values || !text ? FAILED : text == Py_None || PyTuple_Size(values) != count ? OTHER : SAME;
    for (Py_ssize_t i = 0; i < count && same == SAME; i++)
        same = equals_new(PyObject_CallNoArgs(PyTuple_GetItem(self->getters, i)), PyTuple_GetItem(values, i));
    if (same == SAME) same = equals(text, state);
    Py_DECREF(last);
    return same;
}

/* Whether a tensor is torch's own, of which no gradient is wanted now; trained: whether it has requires_grad. */
static int is_plain(Recall *self, PyObject *tensor, int *trained) {
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != self->tensor && type != self->parameter) return OTHER;
    int wanted = *trained = is_true_new(PyObject_GetAttr(tensor, name_requires_grad));
    if (wanted == 1) wanted = is_true_new(PyObject_CallNoArgs(self->is_grad_enabled));
    return wanted < 0 ? FAILED : !wanted;
}

/* Whether autocast leaves products of BF16 as they are. */
static int is_uncast(Recall *self) {
    int casts = is_true_new(PyObject_CallNoArgs(self->autocasts));
    if (casts == 1) casts = is_true_new(PyObject_CallFunctionObjArgs(self->casts, name_cuda, NULL));
    return casts < 0 ? FAILED : !casts;
}

/* product._is_watched, turned round, but for autocast. */
static int is_unwatched(Recall *self) {
    int watched;
    PyObject *level = PyObject_GetAttr(self->forward_ad, name__current_level);
    if (!level) return FAILED;
    long number = PyLong_AsLong(level);
    Py_DECREF(level);
    if (number == -1 && PyErr_Occurred()) return FAILED;
    if (number >= 0) return OTHER;
    int same = equals_new(PyObject_CallNoArgs(self->interpreter), Py_None);
    if (same != SAME) return same;
    watched = is_true_new(PyObject_CallNoArgs(self->modes));
    if (watched) return watched < 0 ? FAILED : OTHER;
    watched = is_true_new(PyObject_CallNoArgs(self->observers));
    if (watched == 1) watched = is_true_new(PyObject_CallNoArgs(self->is_observed));
    if (watched) return watched < 0 ? FAILED : OTHER;
    return equals_new(PyObject_CallNoArgs(self->tracing), Py_None);
}

/* -- A product ----------------------------------------------------------------------------------------------------- */

/* What is asked of the operands once. The version is NULL where an inference tensor has none. */
typedef struct {
    PyObject *turn, *x, *data, *bias, *ids, *id; /* ids: each row's expert; else NULL */
    PyObject *shape; /* by which it is remembered: the input's, or where a weight is decoded alone one without dimensions */
    PyObject *device, *stream, *address, *version;
    PyObject *before; /* torch's device, before that of x was made the current one */
    int trained;      /* x has requires_grad, though no gradient is wanted now: inside of an operation of autograd's */
    uint64_t ids_at;
} Call;

/* Makes the device from before the current one again, if that is not x's. */
static int call_leave(Recall *self, Call *call) {
    if (!call->before) return 0;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    int same = equals(call->before, call->device);
    PyObject *left = same == OTHER ? PyObject_CallFunctionObjArgs(self->restore_device, call->before, NULL) : NULL;
    int failed = same == FAILED || (same == OTHER && !left);
    Py_XDECREF(left);
    if (!failed) {
        PyErr_Restore(type, value, traceback);
    } else {
        Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(traceback);
    }
    return failed ? -1 : 0;
}

static void call_clear(Call *call) {
    Py_XDECREF(call->id), Py_XDECREF(call->shape), Py_XDECREF(call->device), Py_XDECREF(call->address);
    Py_XDECREF(call->version), Py_XDECREF(call->stream), Py_XDECREF(call->before);
}

/* Tensors without strides or memory of their own say so by a RuntimeError, as does a GPU after a fork. */
static int other_or_failed(void) {
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return FAILED;
    PyErr_Clear();
    return OTHER;
}

static int call_read(Recall *self, Call *call) {
    if (!call->shape && !(call->shape = PyObject_GetAttr(call->x, name_shape))) return other_or_failed();
    if (!(call->device = PyObject_CallMethodObjArgs(call->x, name_get_device, NULL))) return FAILED;
    call->before = PyObject_CallFunctionObjArgs(self->exchange_device, call->device, NULL);
    if (!call->before) return other_or_failed();
    int capturing = is_true_new(PyObject_CallNoArgs(self->is_capturing));
    if (capturing) return capturing < 0 ? FAILED : OTHER;
    return (call->stream = PyObject_CallFunctionObjArgs(self->current_stream, call->device, NULL)) ? SAME : FAILED;
}

/* Where x lies, and how often it was written to. */
static int call_read_bytes(Call *call) {
    if (!(call->address = PyObject_CallMethodObjArgs(call->x, name_data_ptr, NULL))) return other_or_failed();
    if (!(call->version = PyObject_GetAttr(call->x, name__version))) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return FAILED;
        PyErr_Clear();
    }
    return SAME;
}

static int turn_is(Call *call) {
    if (!call->version) return OTHER;
    PyObject *last = referent(call->turn, name__tensor);
    if (!last) return FAILED;
    Py_DECREF(last);
    return last == call->x ? bytes_are_at(call->turn, call->version, call->address) : OTHER;
}

/* Whether the turn began with the product that is asked for. */
static int began_turn(Call *call) {
    PyObject *first = referent(call->turn, name_first);
    if (!first) return FAILED;
    Py_DECREF(first);
    return first == call->data ? SAME : OTHER;
}

/* Whether it is there that what the call asks for was made: on this stream; no graph is captured now, and none was then. */
static int is_there(Call *call, PyObject *where) {
    int same = equals(PyTuple_GetItem(where, 0), call->stream);
    if (same != SAME) return same;
    int captured = PyObject_IsTrue(PyTuple_GetItem(where, 1));
    return captured < 0 ? FAILED : !captured;
}

static PyObject *none_or_error(int same) { return same == OTHER ? Py_NewRef(Py_None) : NULL; }

/* Together.take. */
static int may_take(Recall *self, Call *call, PyObject *made) {
    int same = call_read_bytes(call);
    if (same == SAME) same = turn_is(call);
    if (same != SAME) return same;
    PyObject *where = PyObject_GetAttr(call->turn, name_where);
    if (!where) return FAILED;
    same = is_there(call, where);
    Py_DECREF(where);
    if (same != SAME) return same;
    PyObject *weight = PyTuple_GetItem(made, 1);
    if (!weight) return FAILED;
    if ((same = is_true_new(PyObject_GetAttr(weight, name_is_proved))) != SAME) return same;
    PyObject *bytes = PyObject_GetAttr(weight, name_data), *bias = bytes ? PyObject_GetAttr(weight, name_bias) : NULL;
    same = bias ? bytes_are_of(bytes, call->data) : FAILED;
    if (same == SAME) same = bias_is(bias, call->bias);
    Py_XDECREF(bytes), Py_XDECREF(bias);
    if (same != SAME) return same;
    PyObject *state = PyObject_GetAttr(call->turn, name_state);
    if (!state) return FAILED;
    same = state_is(self, state);
    Py_DECREF(state);
    return same;
}

static PyObject *take(Recall *self, Call *call, PyObject *every, PyObject *made) {
    PyObject *y = NULL;
    int may = may_take(self, call, made);
    if (may != SAME) {
        y = none_or_error(may);
    } else if (PyDict_DelItem(every, call->id) == 0) {
        y = Py_XNewRef(PyTuple_GetItem(made, 3));
        if (y && PyDict_Size(every) == 0) {
            PyObject *none = PyLong_FromLong(0);
            if (!none || PyObject_SetAttr(PyTuple_GetItem(made, 0), name_unwanted, none) < 0) Py_CLEAR(y);
            Py_XDECREF(none);
        }
    }
    return y;
}

/* Whether the experts' indices are of the shape, strides and dtype that are remembered, on the device of x. */
static int ids_are(Call *call, PyObject *known) {
    if (!call->ids || known == Py_None) return !call->ids == (known == Py_None) ? SAME : OTHER;
    int same = attribute_equals(call->ids, name_shape, PyTuple_GetItem(known, 0));
    if (same == SAME) same = equals_new(PyObject_CallMethodObjArgs(call->ids, name_stride, NULL), PyTuple_GetItem(known, 1));
    if (same == SAME) same = attribute_equals(call->ids, name_dtype, PyTuple_GetItem(known, 2));
    if (same == SAME) same = equals_new(PyObject_CallMethodObjArgs(call->ids, name_get_device, NULL), call->device);
    PyObject *address = same == SAME ? PyObject_CallMethodObjArgs(call->ids, name_data_ptr, NULL) : NULL;
    if (address) call->ids_at = PyLong_AsUnsignedLongLong(address);
    Py_XDECREF(address);
    if (PyErr_Occurred()) return other_or_failed();
    return same == SAME && !call->ids_at ? OTHER : same;
}

static int may_repeat(Recall *self, Call *call, Shortcut *known, PyObject *resident) {
    int same = call_read_bytes(call);
    if (same == SAME) same = bytes_are_of(resident, call->data);
    if (same != SAME) return same;
    long device = PyLong_AsLong(call->device);
    unsigned long long address = PyLong_AsUnsignedLongLong(call->address);
    if (PyErr_Occurred()) return FAILED;
    if (device != known->device || address % 16) return OTHER;
    if ((same = attribute_equals(call->x, name_dtype, self->dtype)) != SAME) return same;
    if ((same = equals_new(PyObject_CallMethodObjArgs(call->x, name_stride, NULL), known->strides)) != SAME) return same;
    if ((same = equals(call->stream, PyTuple_GetItem(known->where, 0))) != SAME) return same;
    if ((same = ids_are(call, known->ids)) != SAME) return same;
    if (known->finish == Py_None && (same = bias_is(known->bias, call->bias)) != SAME) return same;
    if (known->state != Py_None && (same = state_is(self, known->state)) != SAME) return same;
    if (known->group == Py_None) return SAME;
    PyObject *others = PyObject_GetAttr(known->group, name_others);
    if (!others) return FAILED;
    Py_DECREF(others);
    return others == known->others ? SAME : OTHER;
}

/* Whether a weight can be decoded as it was; the call is read. */
static int may_decode(Call *call, Shortcut *known, PyObject *resident) {
    int same = call_read_bytes(call);
    if (same == SAME) same = bytes_are_of(resident, call->data);
    long device = PyLong_AsLong(call->device);
    if (PyErr_Occurred()) return FAILED;
    if (device != known->device) return OTHER;  /* default streams of all devices have the same number */
    return same == SAME ? equals(call->stream, PyTuple_GetItem(known->where, 0)) : same;
}

/* Holds the bytes of the other weights, and their biases, until the launch. */
static int hold(Shortcut *known, PyObject **held) {
    for (int i = 0; i + 1 < known->products; i++) {
        PyObject *weight = PyTuple_GetItem(known->others, i);
        PyObject *bytes = PyObject_GetAttr(weight, name_data), *bias = bytes ? PyObject_GetAttr(weight, name_bias) : NULL;
        int same = bias && (held[2 * i] = referent(bytes, name__tensor)) ? SAME : FAILED;
        if (same == SAME) same = held[2 * i] == Py_None ? OTHER : bytes_are_of(bytes, held[2 * i]);
        if (same == SAME && bias != Py_None) {
            held[2 * i + 1] = referent(bias, name__tensor);
            same = !held[2 * i + 1] ? FAILED : held[2 * i + 1] == Py_None ? OTHER : bytes_are_of(bias, held[2 * i + 1]);
        }
        Py_XDECREF(bytes), Py_XDECREF(bias);
        if (same != SAME) return same;
    }
    return SAME;
}

/* Holds the weights that are prefetched. OTHER where one is there from the time before, which nobody asked for. */
static int hold_prefetched(Shortcut *known, PyObject **held) {
    for (int i = 0; i < known->outputs - known->products; i++) {
        PyObject *resident = PyTuple_GetItem(known->prefetched, i);
        int same = (held[i] = referent(resident, name__tensor)) ? SAME : FAILED;
        if (same == SAME) same = held[i] == Py_None ? OTHER : bytes_are_of(resident, held[i]);
        if (same == SAME) same = attribute_equals(resident, name_prefetched, Py_None);
        if (same != SAME) return same;
    }
    return SAME;
}

/* Together._begin. */
static int begin(Call *call, Shortcut *known, PyObject *resident) {
    PyObject *reference = PyWeakref_NewRef(call->x, NULL), *first = PyObject_GetAttr(resident, name__tensor);
    int failed = !reference || !first || PyObject_SetAttr(call->turn, name__tensor, reference) < 0 ||
                 PyObject_SetAttr(call->turn, name__version, call->version) < 0 ||
                 PyObject_SetAttr(call->turn, name__address, call->address) < 0 ||
                 PyObject_SetAttr(call->turn, name_where, known->where) < 0 ||
                 PyObject_SetAttr(call->turn, name_state, known->state) < 0 ||
                 PyObject_SetAttr(call->turn, name_first, first) < 0;
    Py_XDECREF(reference), Py_XDECREF(first);
    return failed ? FAILED : SAME;
}

/* Memory for what a launch gives, and for what it needs meanwhile, with their addresses behind that of x. OTHER where there is too little. */
static int allocate(Recall *self, Call *call, Shortcut *known, PyObject **made, uint64_t *addresses) {
    int count = known->outputs + (known->scratch != Py_None), has_ids = known->ids != Py_None;
    addresses[0] = PyLong_AsUnsignedLongLong(call->address);
    if (has_ids) addresses[known->outputs + 1] = call->ids_at;
    for (int i = 0; i < count; i++) {
        PyObject *asked = i < known->outputs ? PyTuple_GetItem(known->allocations, i) : known->scratch;
        if (!(made[i] = PyObject_Call(self->empty, asked, NULL))) return other_or_failed();
        PyObject *address = PyObject_CallMethodObjArgs(made[i], name_data_ptr, NULL);
        if (!address) return FAILED;
        addresses[i + 1 + (has_ids && i == known->outputs)] = PyLong_AsUnsignedLongLong(address);
        Py_DECREF(address);
    }
    return PyErr_Occurred() ? FAILED : SAME;
}

/* What is remembered of a weight for inputs like this one. */
static PyObject *shortcuts_for(Call *call, PyObject *resident) {
    return PyObject_GetAttr(resident, call->trained ? name_training : name_shortcuts);
}

/* So that the next call like this one is made in the usual way. Another thread may have forgotten it before. */
static int forget(Call *call, PyObject *resident) {
    PyObject *shortcuts = shortcuts_for(call, resident);
    if (!shortcuts) return FAILED;
    int failed = PyDict_DelItem(shortcuts, call->shape);
    Py_DECREF(shortcuts);
    if (failed && !PyErr_ExceptionMatches(PyExc_KeyError)) return FAILED;
    PyErr_Clear();
    return OTHER;
}

/* Other threads run meanwhile, for the driver waits where a GPU has as many launches before it as it takes, and these may wait for what another thread
   launches on another GPU. So each call has a copy of its own of what the kernels are told. */
static int launch(Shortcut *known, const uint64_t *addresses) {
    uint64_t room[MAX_ROOM / sizeof(uint64_t)];
    char *told = (char *)room;
    int result = 0;
    memcpy(told, known->room, known->room_bytes);
    for (int i = 0; i < known->patch_count; i++) {
        const Patch *patch = &known->patches[i];
        uint64_t address = addresses[patch->source] + (uint64_t)patch->addend;
        memcpy(told + patch->offset, &address, sizeof address);
    }
    PyThreadState *state = PyEval_SaveThread();
    for (int i = 0; i < known->launch_count && !result; i++) {
        const Launch *each = &known->launches[i];
        void *arguments[MAX_ARGUMENTS];
        for (int j = 0; j < each->count; j++) arguments[j] = told + each->offsets[j];
        result = known->start(each->config, each->function, arguments, NULL);
    }
    PyEval_RestoreThread(state);
    return result;
}

/* Puts what was made for others where these will ask for it: as Together.multiply. */
static int offer(Call *call, Shortcut *known, PyObject **held, PyObject **made) {
    PyObject *every = PyDict_New();
    int failed = !every;
    for (int i = 0; i + 1 < known->products && !failed; i++) {
        PyObject *id = PyLong_FromVoidPtr(held[2 * i]);
        PyObject *one = PyTuple_Pack(4, known->group, PyTuple_GetItem(known->others, i), PyTuple_GetItem(known->plans, i),
                                     made[i + 1]);
        failed = !id || !one || PyDict_SetItem(every, id, one) < 0;
        Py_XDECREF(id), Py_XDECREF(one);
    }
    failed = failed || PyObject_SetAttr(call->turn, name_made, every) < 0;
    Py_XDECREF(every);
    return failed ? FAILED : SAME;
}

/* Puts what was prefetched beside its packed bytes: as Prefetcher.launch. */
static int keep_prefetched(Shortcut *known, PyObject **made) {
    for (int i = known->products; i < known->outputs; i++) {
        PyObject *one = PyTuple_Pack(2, known->where, made[i]);
        int failed = !one || PyObject_SetAttr(PyTuple_GetItem(known->prefetched, i - known->products), name_prefetched, one) < 0;
        Py_XDECREF(one);
        if (failed) return FAILED;
    }
    return SAME;
}

static PyObject *repeat(Recall *self, Call *call, Shortcut *known, PyObject *resident) {
    PyObject *held[2 * MAX_PRODUCTS] = {NULL}, *ahead[MAX_PREFETCHED] = {NULL}, *made[MAX_OUTPUTS + 1] = {NULL}, *y = NULL;
    uint64_t addresses[MAX_OUTPUTS + 3];
    int same = hold(known, held);
    if (same == SAME) same = hold_prefetched(known, ahead);
    if (same == SAME && known->joins) {
        if (call->version) {
            same = turn_is(call);
            if (same == OTHER || (same == SAME && (same = began_turn(call)) == SAME)) same = begin(call, known, resident);
        } else if (known->products > 1) {
            same = OTHER;
        }
    }
    if (same == SAME) {
        same = allocate(self, call, known, made, addresses);
        if (same == OTHER) same = forget(call, resident);
    }
    if (same == SAME) {
        int result = launch(known, addresses);
        if (result) {
            PyObject *code = PyLong_FromLong(result), *none = code ? PyObject_CallFunctionObjArgs(known->failed, code, NULL) : NULL;
            if (none) PyErr_Format(PyExc_RuntimeError, "CUDA driver: error %d", result);
            Py_XDECREF(code), Py_XDECREF(none);
        } else if ((known->products == 1 || offer(call, known, held, made) == SAME) && keep_prefetched(known, made) == SAME) {
            y = known->finish == Py_None ? Py_NewRef(made[0])
                                         : PyObject_CallFunctionObjArgs(known->finish, call->x, made[0], call->bias, NULL);
        }
    } else if (same == OTHER) {
        y = Py_NewRef(Py_None);
    }
    for (int i = 0; i < 2 * MAX_PRODUCTS; i++) Py_XDECREF(held[i]);
    for (int i = 0; i < MAX_PREFETCHED; i++) Py_XDECREF(ahead[i]);
    for (int i = 0; i < MAX_OUTPUTS + 1; i++) Py_XDECREF(made[i]);
    return y;
}

/* Whether a tensor's strides are those of a new one of its shape: key.is_gapless. */
static int is_gapless(PyObject *tensor, PyObject *shape) {
    PyObject *strides = PyObject_CallMethodObjArgs(tensor, name_stride, NULL);
    if (!strides) return other_or_failed();
    Py_ssize_t dimensions = PyTuple_Size(shape);
    long long width = 1;
    int same = PyTuple_Size(strides) == dimensions ? SAME : OTHER;
    for (Py_ssize_t i = dimensions; i-- > 0 && same == SAME;) {
        long long size = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        same = PyLong_AsLongLong(PyTuple_GetItem(strides, i)) == width ? SAME : OTHER;
        width *= size > 1 ? size : 1;
    }
    Py_DECREF(strides);
    return PyErr_Occurred() ? FAILED : same;
}

/* The product with a weight that was decoded ahead; torch makes others of an input with gaps, see packed_module.py. */
static PyObject *multiply_prefetched(Recall *self, Call *call, PyObject *resident, PyObject *prefetched) {
    int same = is_gapless(call->x, call->shape);
    if (same == SAME) same = bytes_are_of(resident, call->data);
    if (same == SAME) same = is_there(call, PyTuple_GetItem(prefetched, 0));
    if (same != SAME) return none_or_error(same);
    if (PyObject_SetAttr(resident, name_prefetched, Py_None) < 0) return NULL;
    return PyObject_CallFunctionObjArgs(self->linear, call->x, PyTuple_GetItem(prefetched, 1), call->bias, NULL);
}

/* The remembered call of this weight and shape, a new reference; NULL without an error if there is none. */
static Shortcut *find(Call *call, PyObject *resident, PyObject *shape) {
    PyObject *shortcuts = shortcuts_for(call, resident);
    if (!shortcuts) return NULL;
    PyObject *known = PyDict_GetItemWithError(shortcuts, shape);
    Py_XINCREF(known);
    Py_DECREF(shortcuts);
    if (known && Py_TYPE(known) != shortcut_type) Py_CLEAR(known);
    return (Shortcut *)known;
}

/* Rows of an input of this shape, of one dimension or more; -1 where an error is set. */
static long long rows_of(PyObject *shape) {
    long long rows = 1;
    for (Py_ssize_t i = 0; i + 1 < PyTuple_Size(shape); i++) rows *= PyLong_AsLongLong(PyTuple_GetItem(shape, i));
    return PyErr_Occurred() ? -1 : rows;
}

/* Whether the number of tokens changes from call to call, and the weight is decoded first whatever it is. */
static int is_unplanned(Recall *self, Call *call, PyObject *resident) {
    int same = is_true_new(PyObject_GetAttr(resident, name_is_changing));
    long long rows = same == SAME && !call->trained ? rows_of(call->shape) : 0;
    if (rows <= self->few_tokens) return same < 0 || rows < 0 ? FAILED : OTHER;
    PyObject *planned = PyObject_GetAttr(resident, name_planned), *number = planned ? PyLong_FromLongLong(rows) : NULL;
    int known = number ? PySet_Contains(planned, number) : -1;
    Py_XDECREF(planned), Py_XDECREF(number);
    if (known) return known < 0 ? FAILED : OTHER;
    return ++self->unplanned % SAMPLE ? SAME : OTHER;
}

/* A product of many tokens whose number has no plan: the weight is decoded first. */
static PyObject *multiply_unplanned(Recall *self, Call *call, PyObject *resident) {
    int same = is_unplanned(self, call, resident);
    if (same == SAME) same = is_gapless(call->x, call->shape);
    if (same == SAME) same = attribute_equals(call->x, name_dtype, self->dtype);
    PyObject *no_shape = PyTuple_New(0);
    Shortcut *known = same == SAME && no_shape ? find(call, resident, no_shape) : NULL;
    Py_XDECREF(no_shape);
    if (same == SAME && !known) same = PyErr_Occurred() ? FAILED : OTHER;
    if (same == SAME) same = may_decode(call, known, resident);
    PyObject *y = same == SAME ? repeat(self, call, known, resident) : none_or_error(same);
    if (same == SAME && y && y != Py_None) {
        PyObject *weight = y;
        y = PyObject_CallFunctionObjArgs(self->linear, call->x, weight, call->bias, NULL);
        Py_DECREF(weight);
    }
    Py_XDECREF((PyObject *)known);
    return y;
}

/* SAME if torch is asked for no more than values, by operands of the usual kind, where launches are made at once. */
static int is_usual(Recall *self, Call *call) {
    int same = is_uncast(self), ignored;
    if (same == SAME) same = is_unwatched(self);
    if (same == SAME) same = is_plain(self, call->x, &call->trained);
    if (same == SAME && call->bias != Py_None) same = is_plain(self, call->bias, &ignored);
    return same == SAME ? call_read(self, call) : same;
}

/* Asks torch nothing where nothing is known of the weight, as on a CPU. */
static PyObject *answer(Recall *self, Call *call, PyObject *every) {
    PyObject *made = PyDict_GetItemWithError(every, call->id);
    PyObject *resident = made || PyErr_Occurred() ? NULL : PyDict_GetItemWithError(self->residents, call->id);
    PyObject *y = NULL;
    if (PyErr_Occurred()) return NULL;
    if (!made && !resident) return Py_NewRef(Py_None);
    Py_XINCREF(made), Py_XINCREF(resident);
    PyObject *prefetched = resident ? PyObject_GetAttr(resident, name_prefetched) : Py_NewRef(Py_None);
    int same = prefetched ? is_usual(self, call) : FAILED;
    if (same != SAME) {
        y = none_or_error(same);
    } else if (made) {
        y = take(self, call, every, made);
    } else if (prefetched != Py_None) {
        y = multiply_prefetched(self, call, resident, prefetched);
    } else {
        Shortcut *known = find(call, resident, call->shape);
        same = known ? SAME : PyErr_Occurred() ? FAILED : OTHER;
        if (same == SAME && known->joins && PyDict_Size(every)) same = OTHER; /* what nobody asked for is counted */
        if (same == SAME) same = may_repeat(self, call, known, resident);
        if (same == OTHER && !known) {
            y = multiply_unplanned(self, call, resident);
        } else {
            y = same == SAME ? repeat(self, call, known, resident) : none_or_error(same);
        }
        Py_XDECREF((PyObject *)known);
    }
    Py_XDECREF(made), Py_XDECREF(resident), Py_XDECREF(prefetched);
    return y;
}

/* What a function makes of what is known of the call's packed bytes; None where nothing is, as on a CPU. */
static PyObject *of_resident(Recall *self, Call *call, PyObject *(*make)(Recall *, Call *, PyObject *)) {
    call->id = PyLong_FromVoidPtr(call->data);
    PyObject *resident = call->id ? PyDict_GetItemWithError(self->residents, call->id) : NULL, *y = NULL;
    Py_XINCREF(resident);
    if (resident) {
        y = make(self, call, resident);
    } else if (!PyErr_Occurred()) {
        y = Py_NewRef(Py_None);
    }
    if (call_leave(self, call)) Py_CLEAR(y);
    Py_XDECREF(resident);
    call_clear(call);
    return y;
}

/* A weight that is decoded alone: its packed bytes are the call's input. */
static PyObject *decode_again(Recall *self, Call *call, PyObject *resident) {
    Shortcut *known = find(call, resident, call->shape);
    int same = known ? is_unwatched(self) : PyErr_Occurred() ? FAILED : OTHER;
    if (same == SAME) same = call_read(self, call);
    if (same == SAME) same = may_decode(call, known, resident);
    PyObject *weight = same == SAME ? repeat(self, call, known, resident) : none_or_error(same);
    Py_XDECREF((PyObject *)known);
    return weight;
}

PyDoc_STRVAR(weight_doc, "weight(data)\n--\n\nThe decoded weight, or None where it is to be decoded in the usual way.");

static PyObject *recall_weight(Recall *self, PyObject *data) {
    Call call = {.x = data, .data = data, .bias = Py_None, .shape = PyTuple_New(0)};
    if (!call.shape) return NULL;
    return of_resident(self, &call, decode_again);
}

PyDoc_STRVAR(product_doc, "product(x, data, bias)\n--\n\nThe product, or None where it is to be made in the usual way.");

static PyObject *recall_product(Recall *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "product(x, data, bias)");
        return NULL;
    }
    int noted = is_true_new(PyObject_GetAttr(self->turns, name_windows)); /* what is asked for */
    if (noted) return none_or_error(noted == 1 ? OTHER : FAILED);
    PyObject *turn = PyObject_GetAttr(self->turns, name_last);
    PyObject *every = turn ? PyObject_GetAttr(turn, name_made) : NULL, *y = NULL;
    Call call = {.turn = turn, .x = args[0], .data = args[1], .bias = args[2]};
    if (every && (call.id = PyLong_FromVoidPtr(call.data))) y = answer(self, &call, every);
    if (call_leave(self, &call)) Py_CLEAR(y);
    Py_XDECREF(turn), Py_XDECREF(every);
    call_clear(&call);
    return y;
}

/* Rows times the experts that they are routed to. */
static PyObject *multiply_experts(Recall *self, Call *call, PyObject *resident) {
    int ignored, same = is_plain(self, call->ids, &ignored);
    if (same == SAME) same = is_usual(self, call);
    Shortcut *known = same == SAME ? find(call, resident, call->shape) : NULL;
    if (same == SAME && !known) same = PyErr_Occurred() ? FAILED : OTHER;
    if (same == SAME) same = may_repeat(self, call, known, resident);
    PyObject *y = same == SAME ? repeat(self, call, known, resident) : none_or_error(same);
    Py_XDECREF((PyObject *)known);
    return y;
}

PyDoc_STRVAR(experts_doc, "experts(x, data, ids)\n--\n\nThe products, or None where they are to be made in the usual way.");

static PyObject *recall_experts(Recall *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "experts(x, data, ids)");
        return NULL;
    }
    Call call = {.x = args[0], .data = args[1], .bias = Py_None, .ids = args[2]};
    return of_resident(self, &call, multiply_experts);
}

/* -- Recall, and the module ---------------------------------------------------------------------------------------- */

static void recall_dealloc(PyObject *self) {
    Recall *own = (Recall *)self;
    give_up(self, &own->turns, &own->empty);
}

static PyObject *recall_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"turns", "residents", "tensor", "parameter", "dtype", "exchange_device", "restore_device",
                            "current_stream", "is_capturing", "autocasts", "casts", "forward_ad", "interpreter", "modes",
                            "tracing", "is_grad_enabled", "environment", "getters", "linear", "observers", "is_observed", "few_tokens", "empty", NULL};
    allocfunc allocate_type = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *fields[22] = {NULL};
    long long few_tokens;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!OOOOOOOOOOOOOOOO!OOOLO", names, &fields[0], &PyDict_Type, &fields[1],
                                     &fields[2], &fields[3], &fields[4], &fields[5], &fields[6], &fields[7], &fields[8],
                                     &fields[9], &fields[10], &fields[11], &fields[12], &fields[13], &fields[14],
                                     &fields[15], &fields[16], &PyTuple_Type, &fields[17], &fields[18], &fields[19],
                                     &fields[20], &few_tokens, &fields[21]))
        return NULL;
    Recall *self = (Recall *)allocate_type(type, 0);
    if (!self) return NULL;
    PyObject **each = &self->turns;
    for (int i = 0; i < 22; i++) each[i] = Py_NewRef(fields[i]);
    self->few_tokens = few_tokens;
    return (PyObject *)self;
}

static PyMethodDef recall_methods[] = {
    {"product", (PyCFunction)(void (*)(void))recall_product, METH_FASTCALL, product_doc},
    {"weight", (PyCFunction)recall_weight, METH_O, weight_doc},
    {"experts", (PyCFunction)(void (*)(void))recall_experts, METH_FASTCALL, experts_doc},
    {NULL, NULL, 0, NULL},
};

static PyObject *shortcut_kept(PyObject *self, void *unused) {
    (void)unused;
    return Py_NewRef(((Shortcut *)self)->kept);
}

static PyGetSetDef shortcut_attributes[] = {
    {"kept", shortcut_kept, NULL, "What it was made of.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot shortcut_slots[] = {
    {Py_tp_getset, shortcut_attributes},
    {Py_tp_doc, "A product as it was made: what it rests on, and its launches; see recall.py."},
    {Py_tp_new, shortcut_new},
    {Py_tp_dealloc, shortcut_dealloc},
    {0, NULL},
};
static PyType_Spec shortcut_spec = {"samebits.plans._recall.Shortcut", sizeof(Shortcut), 0, Py_TPFLAGS_DEFAULT,
                                    shortcut_slots};

static PyType_Slot recall_slots[] = {
    {Py_tp_doc, "Makes products again, by what it is given to ask torch with; see recall.py."},
    {Py_tp_new, recall_new},
    {Py_tp_dealloc, recall_dealloc},
    {Py_tp_methods, recall_methods},
    {0, NULL},
};
static PyType_Spec recall_spec = {"samebits.plans._recall.Recall", sizeof(Recall), 0, Py_TPFLAGS_DEFAULT, recall_slots};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "samebits.plans._recall", "Products made again; see recall.py.", -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__recall(void) {
#define MAKE(name) \
    if (!(name_##name = PyUnicode_InternFromString(#name))) return NULL;
    NAMES(MAKE)
#undef MAKE
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    shortcut_type = (PyTypeObject *)PyType_FromSpec(&shortcut_spec);
    PyObject *recall_type = shortcut_type ? PyType_FromSpec(&recall_spec) : NULL;
    if (!recall_type || PyModule_AddObjectRef(module, "Shortcut", (PyObject *)shortcut_type) < 0 ||
        PyModule_AddObjectRef(module, "Recall", recall_type) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    Py_DECREF(recall_type);
    return module;
}
