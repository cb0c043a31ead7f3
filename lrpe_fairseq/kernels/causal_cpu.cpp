// The causal sums of linear attention on a CPU; causal_cpu.py compiles, loads and calls this.
//
// One sequence after the other goes through the cache in chunks of CHUNK tokens. Within a chunk the
// scores on and below the diagonal are formed; what came before enters through the state, S = sum
// of k v^T and z = sum of k. Only the states at the start of every segment, of many chunks, are
// kept; the backward pass goes from the last segment to the first, and twice through each: in the
// order of time for dq, which needs the states, and against it for dk and dv, which need what comes
// after. `product` is where time is to be spent.
//
// Names: q, k, v queries, keys, values; G and g the gradients of numerators and denominators;
// dq, dk, dv those of q, k, v. D key width, E value width, both filled up to whole vectors.

#include "products.h"

constexpr int CHUNK = 32;  // a multiple of ROWS and of the elements of a vector

enum Wanted { NUMERATOR, SUMS, NORMALIZED };

struct Call {
    int64_t batch, heads, time, keys, values;
    int64_t segment, wanted, threads;  // segment: tokens, a multiple of CHUNK
    double eps;
    const double *log_decay;  // of each head, or null
};

namespace {

template <int STEP, bool HIGH, typename V, int... J>
inline V exchanged(V a, V b, std::integer_sequence<int, J...>) {
    constexpr int N = sizeof...(J);
    if constexpr (HIGH) return __builtin_shufflevector(a, b, ((J & STEP) ? N + J : J + STEP)...);
    return __builtin_shufflevector(a, b, ((J & STEP) ? N + J - STEP : J)...);
}

// Transpose a square of vectors: exchange quarters, then their quarters.
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

// What a decay of r per token leaves within a chunk.
template <typename T>
struct Decay {
    Matrix<T> within;  // r^(s-t) of the scores
    T *into, *out_of;  // r^(i+1) of what came before the chunk; r^(CHUNK-1-i) after the chunk
    T whole = 1;       // r^CHUNK

    void set(double log_rate) {
        for (int s = 0; s < CHUNK; s++) {
            for (int t = 0; t < CHUNK; t++) within[s][t] = T(std::exp(log_rate * std::max(0, s - t)));
            into[s] = T(std::exp(log_rate * (s + 1)));
            out_of[s] = T(std::exp(log_rate * (CHUNK - 1 - s)));
        }
        whole = T(std::exp(log_rate * CHUNK));
    }
};

// What one thread needs for one sequence at a time, in either direction.
template <typename T>
struct Worker {
    using L = Lanes<T>;
    const Call &call;
    const int D, E;
    int64_t batch, head;
    Decay<T> decay;

    explicit Worker(const Call &call)
        : call(call), D(L::filled(call.keys)), E(L::filled(call.values)) {}

    bool decays() const { return call.log_decay != nullptr; }
    bool counts() const { return call.wanted != NUMERATOR; }

    // The rooms that `decay` needs.
    static constexpr int64_t DECAY = CHUNK * (CHUNK + 2);
    void place_decay(Rooms<T> &rooms) {
        decay.within = rooms.matrix(CHUNK, CHUNK);
        decay.into = rooms.matrix(1, CHUNK).data, decay.out_of = rooms.matrix(1, CHUNK).data;
    }

    void begin(int64_t sequence) {
        batch = sequence / call.heads, head = sequence % call.heads;
        if (decays()) decay.set(call.log_decay[head]);
    }

    T *row_of(const Tensor &x, int64_t time) const {
        return static_cast<T *>(x.data) + batch * x.batch + head * x.head + time * x.time;
    }

    int length(int64_t start) const { return int(std::min<int64_t>(CHUNK, call.time - start)); }

    // The chunk of x that starts there, filled up with zeros.
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

    // x with its rows decayed, in `room` unless nothing decays.
    Matrix<T> decayed(Matrix<T> x, const T *factors, Matrix<T> room) const {
        if (!decays()) return x;
        std::memcpy(room.data, x.data, sizeof(T) * CHUNK * x.row);
        decay_rows(room, factors);
        return room;
    }

    // What a chunk leaves of a sum of rows or products.
    void decay_whole(Matrix<T> sum, int rows) const {
        if (decays()) scale(sum.data, decay.whole, int64_t(rows) * sum.row);
    }

    // Decay the scores and zero those above the diagonal, as far as a product wrote any.
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
    Rooms<T> rooms;
    Matrix<T> q, k, v, turned_k, scores, sums, state, z;

    explicit Forward(const Call &call)
        : Base(call), rooms(CHUNK * int64_t(3 * D + 2 * E + CHUNK) + D * E + D + Base::DECAY) {
        q = rooms.matrix(CHUNK, D), k = rooms.matrix(CHUNK, D), v = rooms.matrix(CHUNK, E);
        turned_k = rooms.matrix(D, CHUNK), scores = rooms.matrix(CHUNK, CHUNK);
        sums = rooms.matrix(CHUNK, E), state = rooms.matrix(D, E), z = rooms.matrix(1, D);
        Base::place_decay(rooms);
    }

    // x: q, k, v, states, out, denominators.
    void run(int64_t sequence, const Tensor *x) {
        rooms.clear();
        this->begin(sequence);
        for (int64_t start = 0; start < call.time; start += CHUNK) {
            if (x[3].data && start % call.segment == 0) keep(x[3], start / call.segment);
            this->load(q, x[0], start, call.keys), this->load(k, x[1], start, call.keys);
            this->load(v, x[2], start, call.values);
            transpose(turned_k, k, CHUNK, D);
            product<LOWER, false>(scores, q, turned_k, CHUNK, D, CHUNK);
            this->mask(scores);
            product<LEFT_LOWER, false>(sums, scores, v, CHUNK, CHUNK, E);
            this->decay_rows(q, decay.into);
            product<FULL, true>(sums, q, state, CHUNK, D, E);
            if (counts()) count(x[5], start);
            this->store(x[4], sums, start, call.values);
            this->decay_rows(k, decay.out_of);
            this->decay_whole(state, D);
            product<FULL, true>(state, k.transposed(), v, D, CHUNK, E);
            this->decay_whole(z, 1);
            for (int i = 0; counts() && i < CHUNK; i++) add(z.data, k[i], T(1), D);
        }
    }

    // The denominators of a chunk; divide by them where that is wanted.
    void count(const Tensor &denominators, int64_t start) const {
        T *to = this->row_of(denominators, start);
        for (int i = 0; i < this->length(start); i++) {
            to[i] = dot(q[i], z.data, D) + this->sum_of_row(scores, i);
            if (call.wanted == NORMALIZED) scale(sums[i], T(1) / std::max(to[i], T(call.eps)), E);
        }
    }

    void keep(const Tensor &states, int64_t segment) const {
        T *to = this->row_of(states, segment);
        for (int n = 0; n < call.keys; n++, to += call.values)
            std::memcpy(to, state[n], call.values * sizeof(T));
        std::memcpy(to, z.data, call.keys * sizeof(T));
    }
};

template <typename T>
struct Backward : Worker<T> {
    using Base = Worker<T>;
    using Base::call, Base::D, Base::E, Base::decay, Base::decays, Base::counts;
    Rooms<T> rooms;
    // of a segment
    Matrix<T> all_q, all_k, all_v, all_G, all_dscores;
    T *all_g;
    // of a chunk
    Matrix<T> q, k, v, G, dscores, turned_k, turned_v, scores, dq, dk, dv;
    T *g;
    // S^T and z before the chunk; dS, dS^T and dz, the sums of q G^T and q g, after it
    Matrix<T> turned_state, z, dstate, turned_dstate, dz;
    Matrix<T> room;

    explicit Backward(const Call &call)
        : Base(call),
          rooms(call.segment * (2 * D + 2 * E + CHUNK + 1) +
                CHUNK * int64_t(3 * D + 2 * E + CHUNK) + 3 * D * E + 2 * D + Base::DECAY) {
        const int segment = int(call.segment);
        all_q = rooms.matrix(segment, D), all_k = rooms.matrix(segment, D);
        all_v = rooms.matrix(segment, E), all_G = rooms.matrix(segment, E);
        all_dscores = rooms.matrix(segment, CHUNK), all_g = rooms.matrix(1, segment).data;
        turned_k = rooms.matrix(D, CHUNK), turned_v = rooms.matrix(E, CHUNK);
        scores = rooms.matrix(CHUNK, CHUNK);
        dq = dk = rooms.matrix(CHUNK, D), dv = rooms.matrix(CHUNK, E);
        turned_state = rooms.matrix(E, D), turned_dstate = rooms.matrix(E, D);
        dstate = rooms.matrix(D, E);
        z = rooms.matrix(1, D), dz = rooms.matrix(1, D), room = rooms.matrix(CHUNK, D);
        Base::place_decay(rooms);
    }

    // x: q, k, v, states, out, denominators, their gradients, dq, dk, dv.
    void run(int64_t sequence, const Tensor *x) {
        rooms.clear();
        this->begin(sequence);
        for (int64_t n = (call.time - 1) / call.segment; n >= 0; n--) {
            const int64_t begin = n * call.segment, end = std::min(begin + call.segment, call.time);
            recall(x[3], n);
            int64_t start = begin;
            for (; start < end; start += CHUNK) {
                look_at(start - begin);
                load_chunk(x, start);
                gradient_of_scores();
                gradient_of_queries();
                this->store(x[8], dq, start, call.keys);
            }
            while (start > begin) {
                start -= CHUNK;
                look_at(start - begin);
                gradient_of_keys();
                this->store(x[9], dk, start, call.keys);
                gradient_of_values();
                this->store(x[10], dv, start, call.values);
                advance();
            }
        }
    }

    // The state before a segment.
    void recall(const Tensor &states, int64_t segment) {
        const T *from = this->row_of(states, segment);
        for (int n = 0; n < call.keys; n++)
            for (int j = 0; j < call.values; j++) turned_state[j][n] = *from++;
        std::memcpy(z.data, from, call.keys * sizeof(T));
    }

    void look_at(int64_t row) {
        const auto from = [row](Matrix<T> x) { return Matrix<T>{x[int(row)], x.row}; };
        q = from(all_q), k = from(all_k), v = from(all_v), G = from(all_G);
        dscores = from(all_dscores), g = all_g + row;
    }

    // q, k, v, G and, where denominators count, g.
    void load_chunk(const Tensor *x, int64_t start) {
        this->load(q, x[0], start, call.keys), this->load(k, x[1], start, call.keys);
        this->load(v, x[2], start, call.values), this->load(G, x[6], start, call.values);
        std::fill(g, g + CHUNK, T(0));
        const int here = this->length(start);
        if (call.wanted == SUMS) std::memcpy(g, this->row_of(x[7], start), here * sizeof(T));
        if (call.wanted == NORMALIZED) through_quotient(x[4], this->row_of(x[5], start), start);
    }

    // of out = numerators / max(denominators, eps)
    void through_quotient(const Tensor &out, const T *denominators, int64_t start) {
        this->load(dv, out, start, call.values);
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

    // dq; then the state after the chunk.
    void gradient_of_queries() {
        product<FULL, false>(dq, G, turned_state, CHUNK, E, D);
        for (int i = 0; counts() && i < CHUNK; i++) add(dq[i], z.data, g[i], D);
        this->decay_rows(dq, decay.into);
        product<LEFT_LOWER, true>(dq, dscores, k, CHUNK, CHUNK, D);
        const Matrix<T> left = this->decayed(k, decay.out_of, room);
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

    void gradient_of_values() {
        transpose(turned_k, k, CHUNK, D);
        product<LOWER, false>(scores, q, turned_k, CHUNK, D, CHUNK);
        this->mask(scores);
        product<FULL, false>(dv, this->decayed(k, decay.out_of, room), dstate, CHUNK, D, E);
        product<LEFT_UPPER, true>(dv, scores.transposed(), G, CHUNK, CHUNK, E);
    }

    // dS and dz, from after the chunk to before it.
    void advance() {
        const Matrix<T> seen = this->decayed(q, decay.into, room);
        this->decay_whole(dstate, D);
        product<FULL, true>(dstate, seen.transposed(), G, D, CHUNK, E);
        this->decay_whole(dz, 1);
        for (int i = 0; counts() && i < CHUNK; i++) add(dz.data, seen[i], g[i], D);
    }
};

// A sequence at a time for every thread.
template <typename Direction>
void run(const Call &call, const Tensor *x) {
#pragma omp parallel num_threads(int(call.threads))
    {
        Direction direction(call);
#pragma omp for schedule(dynamic)
        for (int64_t n = 0; n < call.batch * call.heads; n++) direction.run(n, x);
    }
}

}  // namespace

// x: q, k, v, states, out, denominators.
extern "C" void causal_forward(const Call *call, const Tensor *x, int wide) {
    wide ? run<Forward<double>>(*call, x) : run<Forward<float>>(*call, x);
}

// x: q, k, v, states, out, denominators, grad, that of the denominators, dq, dk, dv.
extern "C" void causal_backward(const Call *call, const Tensor *x, int wide) {
    wide ? run<Backward<double>>(*call, x) : run<Backward<float>>(*call, x);
}
