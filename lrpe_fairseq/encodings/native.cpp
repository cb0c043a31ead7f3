// phi, P and Lambda on a CPU, a row at a time; native.py compiles, loads and calls this.
//
// A row of a head is read once and its features are written once. The backward pass forms again,
// from x, what it needs. All in float32.
//
// Names: p = P' phi(x) in the order of an odd-even P; u the unit vector of a reflection, z its
// image of p; turn = exp(i s theta), of the pairs (2j, 2j + 1) or, in the wide form, of every
// feature, which gives twice as many; order the indices of a Lambda that is a permutation.

#include <omp.h>

#include "vectors.h"

struct Call {
    int64_t batch, heads, time, width;
    int64_t turned;  // complex numbers of a row of turn; the features beyond stay
    int64_t phi, halves, wide, permutes, threads;
};

namespace {

using L = Lanes<float>;
using V = L::Vector;
typedef int32_t Integers __attribute__((vector_size(BYTES)));

// e^x for x <= 0, to two units in the last place; what float32 cannot hold becomes 2^-126.
inline V exponential(V x) {
    const V lowest = V{} - 87.336f;
    x = x < lowest ? lowest : x;
    const V magic = V{} + 12582912.0f;  // 1.5 2^23: adding it leaves the nearest integer behind
    const V shifted = x * 1.44269504f + magic;
    const V n = shifted - magic;
    const V r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
    V y = V{} + 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return y * V((Integers(shifted) + 127) << 23);
}

inline V phi(V x) { return x > V{} ? x + 1.0f : exponential(x); }

inline V slope_of_phi(V x, V phi_of_x) { return x > V{} ? V{} + 1.0f : phi_of_x; }

constexpr auto ORDER = std::make_integer_sequence<int, L::COUNT>{};

// Of pairs (a, b): (b, a); (a, a); (b, b); and (a, d) with (c, d) those of y.
template <int... J>
inline V swapped(V x, std::integer_sequence<int, J...>) {
    return __builtin_shufflevector(x, x, (J ^ 1)...);
}
template <int... J>
inline V firsts(V x, std::integer_sequence<int, J...>) {
    return __builtin_shufflevector(x, x, (J & ~1)...);
}
template <int... J>
inline V seconds(V x, std::integer_sequence<int, J...>) {
    return __builtin_shufflevector(x, x, (J | 1)...);
}
template <int... J>
inline V mixed(V x, V y, std::integer_sequence<int, J...>) {
    return __builtin_shufflevector(x, y, (J & 1 ? L::COUNT + J : J)...);
}
inline V swapped(V x) { return swapped(x, ORDER); }

template <typename T = float>
T *row_of(const Tensor &x, int64_t batch, int64_t head, int64_t time) {
    return static_cast<T *>(x.data) + batch * x.batch + head * x.head + time * x.time;
}

// A row in the cache, filled up to whole vectors.
struct Row {
    static constexpr int WIDEST = 1024;
    alignas(64) float data[WIDEST];
    float &operator[](int64_t j) { return data[j]; }
    V &at(int j) { return L::at(data + j); }
    void read(const float *from, int64_t width) { std::memcpy(data, from, width * sizeof(float)); }
    void clear(int64_t width) { std::memset(data, 0, L::filled(width) * sizeof(float)); }
};

// What one thread needs for one row at a time.
struct Rows {
    const Call &call;
    const int64_t D;
    const int filled;
    const float *unit;
    Row x, f, p, z, u;      // f = phi(x) or x, in the order of x
    Row turn, along, across;  // Lambda z = along z + across swapped(z); wide: both times z
    Row g, sum_re, sum_im, sum_u;
    const int64_t *order = nullptr;

    Rows(const Call &call, const float *unit)
        : call(call), D(call.width), filled(L::filled(call.width)), unit(unit) {
        for (Row *row : {&x, &f, &p, &z, &u, &along, &across, &g, &sum_re, &sum_im, &sum_u})
            row->clear(Row::WIDEST);
        for (int64_t j = 0; j < Row::WIDEST; j++) turn[j] = j % 2 == 0;  // beyond E: 1 + 0i
        if (unit) u.read(unit, D);
    }

    // From a row of complex numbers.
    void turn_by(const float *by) {
        if (call.wide) {
            for (int64_t j = 0; j < D; j++) along[j] = by[2 * j], across[j] = by[2 * j + 1];
            return;
        }
        turn.read(by, 2 * call.turned);
        for (int j = 0; j < filled; j += L::COUNT) {
            const V im = seconds(turn.at(j), ORDER);
            along.at(j) = firsts(turn.at(j), ORDER), across.at(j) = mixed(-im, im, ORDER);
        }
    }

    // Take what Lambda does at (batch, time).
    void stand_at(const Tensor &at, int64_t batch, int64_t time) {
        if (call.permutes)
            order = row_of<const int64_t>(at, batch, 0, time);
        else
            turn_by(row_of<const float>(at, batch, 0, time));
    }

    // y - 2 u (u . y)
    void reflect(Row &y) {
        if (unit) add(y.data, u.data, -2 * dot(y.data, u.data, filled), filled);
    }

    // p and z of a row of x.
    void features(const float *from) {
        x.read(from, D);
        for (int j = 0; j < filled; j += L::COUNT) f.at(j) = call.phi ? phi(x.at(j)) : x.at(j);
        if (call.halves)
            for (int64_t j = 0; j < D / 2; j++) p[2 * j] = f[j], p[2 * j + 1] = f[D / 2 + j];
        else
            for (int j = 0; j < filled; j += L::COUNT) p.at(j) = f.at(j);
        for (int j = 0; j < filled; j += L::COUNT) z.at(j) = p.at(j);
        for (int64_t j = D; j < filled; j++) z[j] = 0;
        reflect(z);
    }

    void forward(const float *from, float *to) {
        features(from);
        if (call.permutes) {
            for (int64_t j = 0; j < D; j++) to[j] = z[order[j]];
            return;
        }
        if (call.wide) {
            for (int j = 0; j < filled; j += L::COUNT) g.at(j) = z.at(j) * across.at(j);
            for (int j = 0; j < filled; j += L::COUNT) z.at(j) *= along.at(j);
            std::memcpy(to + D, g.data, D * sizeof(float));
        } else {
            for (int j = 0; j < filled; j += L::COUNT)
                z.at(j) = z.at(j) * along.at(j) + swapped(z.at(j)) * across.at(j);
        }
        std::memcpy(to, z.data, D * sizeof(float));
    }

    // From the gradient of a row of features that of x; those of turn and u are added to the sums.
    void backward(const float *from, const float *grad, float *to, bool of_turn, bool of_unit) {
        if (call.phi || of_turn || of_unit) features(from);
        turn_back(grad, of_turn);
        if (unit) {
            const float along_g = dot(u.data, g.data, filled);
            if (of_unit) {
                add(sum_u.data, g.data, -2 * dot(u.data, p.data, filled), filled);
                add(sum_u.data, p.data, -2 * along_g, filled);
            }
            add(g.data, u.data, -2 * along_g, filled);
        }
        Row &features = call.halves ? z : g;
        for (int64_t j = 0; call.halves && j < D / 2; j++)
            z[j] = g[2 * j], z[D / 2 + j] = g[2 * j + 1];
        for (int j = 0; call.phi && j < filled; j += L::COUNT)
            features.at(j) *= slope_of_phi(x.at(j), f.at(j));
        std::memcpy(to, features.data, D * sizeof(float));
    }

    // g = Lambda^H grad, the gradient of z; that of turn is grad conj(z).
    void turn_back(const float *grad, bool of_turn) {
        if (call.permutes) {
            for (int64_t j = 0; j < D; j++) g[order[j]] = grad[j];
            return;
        }
        g.read(grad, D);
        if (call.wide) {
            Row im;
            im.clear(D);
            im.read(grad + D, D);
            for (int j = 0; j < filled; j += L::COUNT) {
                if (of_turn) sum_re.at(j) += g.at(j) * z.at(j), sum_im.at(j) += im.at(j) * z.at(j);
                g.at(j) = g.at(j) * along.at(j) + im.at(j) * across.at(j);
            }
            return;
        }
        for (int j = 0; j < filled; j += L::COUNT) {
            if (of_turn) {
                sum_re.at(j) += g.at(j) * z.at(j);
                sum_im.at(j) += g.at(j) * swapped(z.at(j));
            }
            g.at(j) = g.at(j) * along.at(j) - swapped(g.at(j)) * across.at(j);
        }
    }

    // Hand the sums over turn out, (re, im) by (re, im), and begin anew.
    void give_turn(float *to) {
        for (int64_t j = 0; call.wide && j < D; j++) to[2 * j] = sum_re[j], to[2 * j + 1] = sum_im[j];
        for (int j = 0; !call.wide && j < filled; j += L::COUNT) {
            const V re = sum_re.at(j) + swapped(sum_re.at(j));
            g.at(j) = mixed(re, sum_im.at(j) - swapped(sum_im.at(j)), ORDER);
        }
        if (!call.wide) std::memcpy(to, g.data, 2 * call.turned * sizeof(float));
        sum_re.clear(D), sum_im.clear(D);
    }
};

// Do something with every row of every head, token by token: one(rows, batch, head, time), then
// done(rows, batch, time) where Lambda is another one next. at: turn or order, (batch, time); the
// stride of batch is 0 where all share it. grad_units: room for the sum of every thread, or null.
template <typename One, typename Done>
void each(const Call &call, const float *unit, const Tensor &at, float *grad_units, One one,
          Done done) {
#pragma omp parallel num_threads(int(call.threads))
    {
        const auto rows = std::make_unique<Rows>(call, unit);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < call.time; t++)
            for (int64_t b = 0; b < call.batch; b++) {
                if (b == 0 || at.batch) rows->stand_at(at, b, t);
                for (int64_t h = 0; h < call.heads; h++) one(*rows, b, h, t);
                if (b == call.batch - 1 || at.batch) done(*rows, b, t);
            }
        if (grad_units)
            std::memcpy(grad_units + omp_get_thread_num() * call.width, rows->sum_u.data,
                        call.width * sizeof(float));
    }
}

}  // namespace

// x: x, out, turn or order (batch, 1, time). unit: or null.
extern "C" void encode_forward(const Call *call, const Tensor *x, const float *unit) {
    each(
        *call, unit, x[2], nullptr,
        [&](Rows &rows, int64_t b, int64_t h, int64_t t) {
            rows.forward(row_of(x[0], b, h, t), row_of(x[1], b, h, t));
        },
        [](Rows &, int64_t, int64_t) {});
}

// x: x (none where neither phi nor a parameter asks for it), the gradient of out, turn or order,
// that of x, that of turn or none. grad_units: zeros (threads, width), whose sum is that of unit, or
// null.
extern "C" void encode_backward(const Call *call, const Tensor *x, const float *unit,
                                float *grad_units) {
    const bool of_turn = x[4].data, of_unit = grad_units;
    each(
        *call, unit, x[2], grad_units,
        [&](Rows &rows, int64_t b, int64_t h, int64_t t) {
            rows.backward(row_of(x[0], b, h, t), row_of(x[1], b, h, t), row_of(x[3], b, h, t),
                          of_turn, of_unit);
        },
        [&](Rows &rows, int64_t b, int64_t t) {
            if (of_turn) rows.give_turn(row_of(x[4], b, 0, t));
        });
}
