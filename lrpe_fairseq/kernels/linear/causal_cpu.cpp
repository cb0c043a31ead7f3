// Causal sums of linear attention on a CPU; causal_cpu.py compiles, loads and calls this.
//
// A thread processes one sequence at a time, in chunks of CHUNK tokens. Within a chunk it computes
// the scores on and below the diagonal. Earlier tokens contribute through the state, S = sum of k v^T
// and z = sum of k. Only the states at the start of every segment (many chunks) are saved. The
// backward pass processes the segments from last to first, and the chunks of each segment twice:
// forwards for dq, which needs the states, then backwards for dk and dv, which need sums over later
// tokens. Almost all time is spent in `product`.
//
// Names: q, k, v are queries, keys and values; G and g the gradients of numerators and denominators;
// dq, dk, dv the gradients of q, k, v. D is the key width and E the value width, both padded to whole
// vectors. `turned` means transposed.
//
// A decay is constant (one rate per head) or per token (gates): the score of (s, t) is multiplied by
// f = exp(gate) of each of the tokens t+1..s. Only products of f within a chunk are formed, so nothing
// overflows, and f may be 0. The gradient of gate t is the sum over s >= t of q_s . dq_s - k_s . dk_s.

#include "products.h"

constexpr int CHUNK = 32;  // a multiple of ROWS and of the elements of a vector

typedef const double *Rates;

// segment: length in tokens, a multiple of CHUNK. double_precision: 1 if all tensors are double, 0 if
// float. with_denominators: 1 if denominators are computed. normalizes: 1 if out is the quotient.
// log_decay: one number per head, or null. gates: (batch, head, time), as double; no data if the decay
// is constant. The forward pass writes out, denominators and states. The backward pass reads these, grad
// and grad_denominators, and writes grad_q, grad_k, grad_v and, as double, grad_gates.
#define CALL_FIELDS(F)                  \
    F(Call, int64_t, batch)             \
    F(Call, int64_t, heads)             \
    F(Call, int64_t, time)              \
    F(Call, int64_t, keys)              \
    F(Call, int64_t, values)            \
    F(Call, int64_t, segment)           \
    F(Call, int64_t, threads)           \
    F(Call, int64_t, double_precision)  \
    F(Call, int64_t, with_denominators) \
    F(Call, int64_t, normalizes)        \
    F(Call, double, eps)                \
    F(Call, Rates, log_decay)           \
    F(Call, Tensor, q)                  \
    F(Call, Tensor, k)                  \
    F(Call, Tensor, v)                  \
    F(Call, Tensor, states)             \
    F(Call, Tensor, out)                \
    F(Call, Tensor, denominators)       \
    F(Call, Tensor, grad)               \
    F(Call, Tensor, grad_denominators)  \
    F(Call, Tensor, gates)              \
    F(Call, Tensor, grad_q)             \
    F(Call, Tensor, grad_k)             \
    F(Call, Tensor, grad_v)             \
    F(Call, Tensor, grad_gates)
DEFINE_STRUCT(Call, CALL_FIELDS, call_fields)

namespace {

template <int STEP, bool HIGH, typename V, int... J>
inline V exchanged(V a, V b, std::integer_sequence<int, J...>) {
    constexpr int N = sizeof...(J);
    if constexpr (HIGH) return __builtin_shufflevector(a, b, ((J & STEP) ? N + J : J + STEP)...);
    return __builtin_shufflevector(a, b, ((J & STEP) ? N + J - STEP : J)...);
}

// Transpose a square of vectors: exchange two quadrants, then recurse into all four.
template <int STEP, typename T>
inline void exchange(typename Lanes<T>::Vector *x) {
    if constexpr (STEP > 0) {
        constexpr int N = Lanes<T>::COUNT;
        constexpr auto order = std::make_integer_sequence<int, N>{};
        for (int i = 0; i < N; i++)
            if (!(i & STEP)) {
                auto upper = x[i], lower = x[i + STEP];
                x[i] = exchanged<STEP, false>(upper, lower, order);
                x[i + STEP] = exchanged<STEP, true>(upper, lower, order);
            }
        exchange<STEP / 2, T>(x);
    }
}

// to (columns x rows) = from (rows x columns), transposed.
template <typename T>
void transpose(Matrix<T> to, Matrix<T> from, int rows, int columns) {
    using L = Lanes<T>;
    for (int i = 0; i < rows; i += L::COUNT)
        for (int j = 0; j < columns; j += L::COUNT) {
            typename L::Vector square[L::COUNT];
            for (int n = 0; n < L::COUNT; n++) square[n] = L::at(from[i + n] + j);
            exchange<L::COUNT / 2, T>(square);
            for (int n = 0; n < L::COUNT; n++) L::at(to[j + n] + i) = square[n];
        }
}

// Factors within a chunk.
template <typename T>
struct Decay {
    Matrix<T> within;  // from token t to token s, for the scores
    T *into, *out_of;  // from the state to token i; from token i to the state
    T whole = 1;       // from the state before the chunk to the one after it

    // A constant decay: powers of r = exp(log_rate).
    void set(double log_rate) {
        for (int s = 0; s < CHUNK; s++) {
            for (int t = 0; t < CHUNK; t++) within[s][t] = T(std::exp(log_rate * std::max(0, s - t)));
            into[s] = T(std::exp(log_rate * (s + 1)));
            out_of[s] = T(std::exp(log_rate * (CHUNK - 1 - s)));
        }
        whole = T(std::exp(log_rate * CHUNK));
    }

    // A decay per token, of gates[0], gates[step], .... From token `length` on the gates are 0.
    void set(const double *gates, int64_t step, int length) {
        double row[CHUNK] = {}, first = 1;  // the row of `within`, and the next number of `into`
        for (int s = 0; s < CHUNK; s++) {
            const double factor = s < length ? std::exp(gates[s * step]) : 1;
            for (int t = 0; t < CHUNK; t++) row[t] = without_denormals(row[t] * factor);
            row[s] = 1, first = without_denormals(first * factor);
            for (int t = 0; t < CHUNK; t++) within[s][t] = T(row[t]);
            into[s] = T(first);
        }
        std::memcpy(out_of, within[CHUNK - 1], CHUNK * sizeof(T));
        whole = T(first);
    }

    // Numbers close to the smallest normal one become 0, because denormal numbers are slow.
    static double without_denormals(double x) {
        using Limits = std::numeric_limits<T>;
        return x < Limits::min() / Limits::epsilon() ? 0.0 : x;
    }
};

// Base class of Forward and Backward. Each thread has one and processes one sequence at a time.
template <typename T>
struct Worker {
    using L = Lanes<T>;
    const Call &call;
    const int D, E;
    int64_t batch, head;
    Decay<T> decay;

    explicit Worker(const Call &call)
        : call(call), D(L::filled(call.keys)), E(L::filled(call.values)) {}

    bool decays() const { return call.log_decay || call.gates.data; }
    bool counts() const { return call.with_denominators; }

    // Number of elements of `decay`.
    static constexpr int64_t DECAY = CHUNK * (CHUNK + 2);
    void place_decay(Workspace<T> &space) {
        decay.within = space.matrix(CHUNK, CHUNK);
        decay.into = space.matrix(1, CHUNK).data, decay.out_of = space.matrix(1, CHUNK).data;
    }

    void begin(int64_t sequence) {
        batch = sequence / call.heads, head = sequence % call.heads;
        if (call.log_decay) decay.set(call.log_decay[head]);
    }

    // Compute the factors of the chunk from `start` if the decay is per token.
    void begin_chunk(int64_t start) {
        const Tensor &gates = call.gates;
        if (gates.data) decay.set(row_of<double>(gates, start), gates.time, length(start));
    }

    template <typename Element = T>
    Element *row_of(const Tensor &x, int64_t time) const {
        return static_cast<Element *>(x.data) + batch * x.batch + head * x.head + time * x.time;
    }

    int length(int64_t start) const { return int(std::min<int64_t>(CHUNK, call.time - start)); }

    // Read the chunk of x from `start`. Rows after the last token are zero.
    void load(Matrix<T> to, const Tensor &x, int64_t start, int64_t width) const {
        const int here = length(start);
        for (int i = 0; i < here; i++)
            std::memcpy(to[i], row_of(x, start + i), width * sizeof(T));
        for (int i = here; i < CHUNK; i++) std::memset(to[i], 0, width * sizeof(T));
    }

    void store(const Tensor &x, Matrix<T> from, int64_t start, int64_t width) const {
        for (int i = 0; i < length(start); i++)
            std::memcpy(row_of(x, start + i), from[i], width * sizeof(T));
    }

    void decay_rows(Matrix<T> x, const T *factors) const {
        for (int i = 0; decays() && i < CHUNK; i++) scale(x[i], factors[i], x.row);
    }

    // Return x with decayed rows: a copy in `buffer`, or x itself without a decay.
    Matrix<T> decayed(Matrix<T> x, const T *factors, Matrix<T> buffer) const {
        if (!decays()) return x;
        std::memcpy(buffer.data, x.data, sizeof(T) * CHUNK * x.row);
        decay_rows(buffer, factors);
        return buffer;
    }

    // Decay a state (or its row z) over one chunk.
    void decay_whole(Matrix<T> sum, int rows) const {
        if (decays()) scale(sum.data, decay.whole, int64_t(rows) * sum.row);
    }

    // Apply the decay and the causal mask to the scores, in the columns that `product` wrote.
    void mask(Matrix<T> x) const {
        for (int i = 0; i < CHUNK; i++) {
            const int end = std::min(CHUNK, L::filled(i / ROWS * ROWS + ROWS));
            for (int j = 0; decays() && j < end; j += L::COUNT)
                L::at(x[i] + j) *= L::at(decay.within[i] + j);
            std::fill(x[i] + i + 1, x[i] + end, T(0));
        }
    }

    T sum_of_row(Matrix<T> x, int i) const {
        typename L::Vector sum{};
        for (int j = 0; j <= i; j += L::COUNT) sum += L::at(x[i] + j);
        return total<T>(sum);
    }
};

template <typename T>
struct Forward : Worker<T> {
    using Base = Worker<T>;
    using Base::call, Base::D, Base::E, Base::decay, Base::decays, Base::counts;
    Workspace<T> space;
    Matrix<T> q, k, v, turned_k, scores, sums, state, z;

    explicit Forward(const Call &call)
        : Base(call), space(CHUNK * int64_t(3 * D + 2 * E + CHUNK) + D * E + D + Base::DECAY) {
        q = space.matrix(CHUNK, D), k = space.matrix(CHUNK, D), v = space.matrix(CHUNK, E);
        turned_k = space.matrix(D, CHUNK), scores = space.matrix(CHUNK, CHUNK);
        sums = space.matrix(CHUNK, E), state = space.matrix(D, E), z = space.matrix(1, D);
        Base::place_decay(space);
    }

    void run(int64_t sequence) {
        space.clear();
        this->begin(sequence);
        for (int64_t start = 0; start < call.time; start += CHUNK) {
            if (call.states.data && start % call.segment == 0) keep(start / call.segment);
            this->begin_chunk(start);
            this->load(q, call.q, start, call.keys), this->load(k, call.k, start, call.keys);
            this->load(v, call.v, start, call.values);
            transpose(turned_k, k, CHUNK, D);
            product<LOWER, false>(scores, q, turned_k, CHUNK, D, CHUNK);
            this->mask(scores);
            product<LEFT_LOWER, false>(sums, scores, v, CHUNK, CHUNK, E);
            this->decay_rows(q, decay.into);
            product<FULL, true>(sums, q, state, CHUNK, D, E);
            if (counts()) count(start);
            this->store(call.out, sums, start, call.values);
            this->decay_rows(k, decay.out_of);
            this->decay_whole(state, D);
            product<FULL, true>(state, k.transposed(), v, D, CHUNK, E);
            this->decay_whole(z, 1);
            for (int i = 0; counts() && i < CHUNK; i++) add(z.data, k[i], T(1), D);
        }
    }

    // Write the denominators of a chunk, and divide the sums by them if out is the quotient.
    void count(int64_t start) const {
        T *to = this->row_of(call.denominators, start);
        for (int i = 0; i < this->length(start); i++) {
            to[i] = dot(q[i], z.data, D) + this->sum_of_row(scores, i);
            if (call.normalizes) scale(sums[i], T(1) / std::max(to[i], T(call.eps)), E);
        }
    }

    // Save the state before a segment for the backward pass.
    void keep(int64_t segment) const {
        T *to = this->row_of(call.states, segment);
        for (int n = 0; n < call.keys; n++, to += call.values)
            std::memcpy(to, state[n], call.values * sizeof(T));
        std::memcpy(to, z.data, call.keys * sizeof(T));
    }
};

template <typename T>
struct Backward : Worker<T> {
    using Base = Worker<T>;
    using Base::call, Base::D, Base::E, Base::decay, Base::decays, Base::counts;
    Workspace<T> space;
    // for a segment
    Matrix<T> all_q, all_k, all_v, all_G, all_dscores;
    T *all_g;
    // for a chunk
    Matrix<T> q, k, v, G, dscores, turned_k, turned_v, scores, dq, dk, dv;
    T *g;
    // S^T and z before the chunk; dS, dS^T and dz (sums of q G^T and q g) after it
    Matrix<T> turned_state, z, dstate, turned_dstate, dz;
    Matrix<T> buffer;
    double dgate;  // the gradient of the gate of the token after the chunk

    explicit Backward(const Call &call)
        : Base(call),
          space(call.segment * (2 * D + 2 * E + CHUNK + 1) +
                CHUNK * int64_t(3 * D + 2 * E + CHUNK) + 3 * D * E + 2 * D + Base::DECAY) {
        const int segment = int(call.segment);
        all_q = space.matrix(segment, D), all_k = space.matrix(segment, D);
        all_v = space.matrix(segment, E), all_G = space.matrix(segment, E);
        all_dscores = space.matrix(segment, CHUNK), all_g = space.matrix(1, segment).data;
        turned_k = space.matrix(D, CHUNK), turned_v = space.matrix(E, CHUNK);
        scores = space.matrix(CHUNK, CHUNK);
        dq = dk = space.matrix(CHUNK, D), dv = space.matrix(CHUNK, E);
        turned_state = space.matrix(E, D), turned_dstate = space.matrix(E, D);
        dstate = space.matrix(D, E);
        z = space.matrix(1, D), dz = space.matrix(1, D), buffer = space.matrix(CHUNK, D);
        Base::place_decay(space);
    }

    void run(int64_t sequence) {
        space.clear();
        this->begin(sequence);
        dgate = 0;
        for (int64_t n = (call.time - 1) / call.segment; n >= 0; n--) {
            const int64_t begin = n * call.segment, end = std::min(begin + call.segment, call.time);
            recall(n);
            int64_t start = begin;
            for (; start < end; start += CHUNK) {
                look_at(start - begin);
                this->begin_chunk(start);
                load_chunk(start);
                gradient_of_scores();
                gradient_of_queries();
                keep_for_gates(start);
                this->store(call.grad_q, dq, start, call.keys);
            }
            while (start > begin) {
                start -= CHUNK;
                look_at(start - begin);
                this->begin_chunk(start);
                gradient_of_keys();
                gradient_of_gates(start);
                this->store(call.grad_k, dk, start, call.keys);
                gradient_of_values();
                this->store(call.grad_v, dv, start, call.values);
                advance();
            }
            if (call.grad_gates.data) dgate = across(n);
        }
    }

    // Read the saved state before a segment.
    void recall(int64_t segment) {
        const T *from = this->row_of(call.states, segment);
        for (int n = 0; n < call.keys; n++)
            for (int j = 0; j < call.values; j++) turned_state[j][n] = *from++;
        std::memcpy(z.data, from, call.keys * sizeof(T));
    }

    void look_at(int64_t row) {
        const auto from = [row](Matrix<T> x) { return Matrix<T>{x[int(row)], x.row}; };
        q = from(all_q), k = from(all_k), v = from(all_v), G = from(all_G);
        dscores = from(all_dscores), g = all_g + row;
    }

    // Read q, k, v, G and, with denominators, g.
    void load_chunk(int64_t start) {
        this->load(q, call.q, start, call.keys), this->load(k, call.k, start, call.keys);
        this->load(v, call.v, start, call.values), this->load(G, call.grad, start, call.values);
        std::fill(g, g + CHUNK, T(0));
        const int here = this->length(start);
        if (call.normalizes)
            through_quotient(start);
        else if (counts())
            std::memcpy(g, this->row_of(call.grad_denominators, start), here * sizeof(T));
    }

    // Compute G and g from the gradient of out = numerators / max(denominators, eps).
    void through_quotient(int64_t start) {
        const T *denominators = this->row_of(call.denominators, start);
        this->load(dv, call.out, start, call.values);
        for (int i = 0; i < this->length(start); i++) {
            scale(G[i], T(1) / std::max(denominators[i], T(call.eps)), E);
            g[i] = denominators[i] < T(call.eps) ? T(0) : -dot(G[i], dv[i], E);
        }
    }

    void gradient_of_scores() {
        transpose(turned_v, v, CHUNK, E);
        for (int i = 0; i < CHUNK; i++) std::fill(dscores[i], dscores[i] + CHUNK, g[i]);
        product<LOWER, true>(dscores, G, turned_v, CHUNK, E, CHUNK);
        this->mask(dscores);
    }

    // Compute dq, then advance the state over the chunk.
    void gradient_of_queries() {
        product<FULL, false>(dq, G, turned_state, CHUNK, E, D);
        for (int i = 0; counts() && i < CHUNK; i++) add(dq[i], z.data, g[i], D);
        this->decay_rows(dq, decay.into);
        product<LEFT_LOWER, true>(dq, dscores, k, CHUNK, CHUNK, D);
        const Matrix<T> left = this->decayed(k, decay.out_of, buffer);
        this->decay_whole(turned_state, E);
        product<FULL, true>(turned_state, v.transposed(), left, E, CHUNK, D);
        this->decay_whole(z, 1);
        for (int i = 0; counts() && i < CHUNK; i++) add(z.data, left[i], T(1), D);
    }

    void gradient_of_keys() {
        transpose(turned_dstate, dstate, D, E);
        product<FULL, false>(dk, v, turned_dstate, CHUNK, E, D);
        for (int i = 0; counts() && i < CHUNK; i++) add(dk[i], dz.data, T(1), D);
        this->decay_rows(dk, decay.out_of);
        product<LEFT_UPPER, true>(dk, dscores.transposed(), q, CHUNK, CHUNK, D);
    }

    // Write q . dq of a chunk, for gradient_of_gates.
    void keep_for_gates(int64_t start) const {
        if (!call.grad_gates.data) return;
        double *to = this->template row_of<double>(call.grad_gates, start);
        for (int i = 0; i < this->length(start); i++) to[i] = dot(q[i], dq[i], D);
    }

    // Replace q . dq by the sum of q . dq - k . dk over this token and all later ones. The gate of
    // the first token acts on nothing.
    void gradient_of_gates(int64_t start) {
        if (!call.grad_gates.data) return;
        double *to = this->template row_of<double>(call.grad_gates, start);
        for (int i = this->length(start) - 1; i >= 0; i--)
            to[i] = dgate += to[i] - double(dot(k[i], dk[i], D));
        if (start == 0) to[0] = 0;
    }

    // Return the same sum for the first token of a segment: the product of the states before it and
    // of the gradients from it on. So rounding errors do not add up over segments.
    double across(int64_t segment) {
        recall(segment);
        transpose(turned_dstate, dstate, D, E);
        double sum = dot(z.data, dz.data, D);
        for (int j = 0; j < E; j++) sum += dot(turned_state[j], turned_dstate[j], D);
        return sum;
    }

    void gradient_of_values() {
        transpose(turned_k, k, CHUNK, D);
        product<LOWER, false>(scores, q, turned_k, CHUNK, D, CHUNK);
        this->mask(scores);
        product<FULL, false>(dv, this->decayed(k, decay.out_of, buffer), dstate, CHUNK, D, E);
        product<LEFT_UPPER, true>(dv, scores.transposed(), G, CHUNK, CHUNK, E);
    }

    // Advance dS and dz from the end of the chunk to its start.
    void advance() {
        const Matrix<T> seen = this->decayed(q, decay.into, buffer);
        this->decay_whole(dstate, D);
        product<FULL, true>(dstate, seen.transposed(), G, D, CHUNK, E);
        this->decay_whole(dz, 1);
        for (int i = 0; counts() && i < CHUNK; i++) add(dz.data, seen[i], g[i], D);
    }
};

template <typename Direction>
void run(const Call &call) {
#pragma omp parallel num_threads(int(call.threads))
    {
        Direction direction(call);
#pragma omp for schedule(dynamic)
        for (int64_t n = 0; n < call.batch * call.heads; n++) direction.run(n);
    }
}

}  // namespace

extern "C" void causal_forward(const Call *call) {
    call->double_precision ? run<Forward<double>>(*call) : run<Forward<float>>(*call);
}

extern "C" void causal_backward(const Call *call) {
    call->double_precision ? run<Backward<double>>(*call) : run<Backward<float>>(*call);
}
