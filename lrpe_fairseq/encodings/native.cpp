// phi, P and Lambda on a CPU, a row at a time; native.py compiles, loads and calls this.
//
// A row of a head is read once and its features are written once. The backward pass forms again,
// from x, what it needs. All in float32.
//
// Names: p = P' phi(x) in the order of an odd-even P; u the unit vector of a reflection, z its
// image of p; turn = exp(i s theta), of the pairs (2j, 2j + 1) or, in the wide form, of every
// feature, which gives twice as many; order the indices of a Lambda that is a permutation. A Fourier
// matrix P turns all heads of a token at once.

#include <omp.h>

#include "products.h"

struct Call {
    int64_t batch, heads, time, width;
    int64_t turned;  // complex numbers of a row of turn; the features beyond stay
    int64_t phi, halves, wide, permutes;
    int64_t of_unit, threads;  // of_unit: whether the backward pass is asked for the gradient of u
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

// Null where x is none.
template <typename T = float>
T *row_of(const Tensor &x, int64_t batch, int64_t head, int64_t time) {
    if (!x.data) return nullptr;
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
    const int64_t *order = nullptr;  // of the first head; of the next that far on
    int64_t order_of_next = 0;

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
            order = row_of<const int64_t>(at, batch, 0, time), order_of_next = at.head;
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

    void forward(const Tensor &from, const Tensor &to, int64_t batch, int64_t time) {
        for (int64_t h = 0; h < call.heads; h++)
            forward(row_of(from, batch, h, time), row_of(to, batch, h, time), h);
    }

    void backward(const Tensor &from, const Tensor &grad, const Tensor &to, int64_t batch,
                  int64_t time, bool of_turn) {
        for (int64_t h = 0; h < call.heads; h++)
            backward(row_of(from, batch, h, time), row_of(grad, batch, h, time),
                     row_of(to, batch, h, time), of_turn, h);
    }

    void forward(const float *from, float *to, int64_t head) {
        features(from);
        if (call.permutes) {
            const int64_t *own = order + head * order_of_next;
            for (int64_t j = 0; j < D; j++) to[j] = z[own[j]];
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
    void backward(const float *from, const float *grad, float *to, bool of_turn, int64_t head) {
        if (from) features(from);
        turn_back(grad, of_turn, head);
        if (unit) {
            const float along_g = dot(u.data, g.data, filled);
            if (call.of_unit) {
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
    void turn_back(const float *grad, bool of_turn, int64_t head) {
        if (call.permutes) {
            const int64_t *own = order + head * order_of_next;
            for (int64_t j = 0; j < D; j++) g[own[j]] = grad[j];
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

// What one thread needs for all heads of one token, where P is a Fourier matrix and Lambda unitary.
struct Spectra {
    const Call &call;
    const int64_t D;
    const int F, rows;  // D and the heads, filled up
    Rooms<float> rooms;
    Matrix<float> x, p, z, g, dp;          // z = p F and its gradient: real parts, imaginary parts
    Matrix<float> fourier, turned_fourier;  // (F, 2F), and the other way round
    Matrix<float> along, across, sums;

    Spectra(const Call &call, const float *matrix)
        : call(call), D(call.width), F(L::filled(call.width)),
          rows(int((call.heads + ROWS - 1) / ROWS * ROWS)),
          rooms(7 * int64_t(rows) * F + 4 * F * F + 4 * F) {
        x = rooms.matrix(rows, F), p = rooms.matrix(rows, F), dp = rooms.matrix(rows, F);
        z = rooms.matrix(rows, 2 * F), g = rooms.matrix(rows, 2 * F);
        fourier = rooms.matrix(F, 2 * F), turned_fourier = rooms.matrix(2 * F, F);
        along = rooms.matrix(1, F), across = rooms.matrix(1, F), sums = rooms.matrix(1, 2 * F);
        rooms.clear();
        for (int i = 0; i < D; i++)
            for (int part = 0; part < 2; part++)
                for (int j = 0; j < D; j++)
                    fourier[i][part * F + j] = turned_fourier[part * F + j][i] =
                        matrix[(2 * i + part) * D + j];
    }

    void stand_at(const Tensor &at, int64_t batch, int64_t time) {
        const float *turn = row_of<const float>(at, batch, 0, time);
        for (int64_t j = 0; j < D; j++) along.data[j] = turn[2 * j], across.data[j] = turn[2 * j + 1];
    }

    // x, p and z of a token.
    void features(const Tensor &from, int64_t batch, int64_t time) {
        for (int h = 0; h < call.heads; h++) {
            std::memcpy(x[h], row_of(from, batch, h, time), D * sizeof(float));
            for (int j = 0; j < F; j += L::COUNT)
                L::at(p[h] + j) = call.phi ? phi(L::at(x[h] + j)) : L::at(x[h] + j);
        }
        product<FULL, false>(z, p, fourier, rows, int(D), 2 * F);
    }

    // Every row times turn, or times its conjugate.
    void turn(Matrix<float> y, float sign) {
        for (int h = 0; h < call.heads; h++)
            for (int j = 0; j < F; j += L::COUNT) {
                V &re = L::at(y[h] + j), &im = L::at(y[h] + F + j);
                const V real = re, by = sign * L::at(across.data + j);
                re = real * L::at(along.data + j) - im * by;
                im = real * by + im * L::at(along.data + j);
            }
    }

    void forward(const Tensor &from, const Tensor &to, int64_t batch, int64_t time) {
        features(from, batch, time);
        turn(z, 1);
        for (int h = 0; h < call.heads; h++)
            for (int part = 0; part < 2; part++)
                std::memcpy(row_of(to, batch, h, time) + part * D, z[h] + part * F,
                            D * sizeof(float));
    }

    void backward(const Tensor &from, const Tensor &grad, const Tensor &to, int64_t batch,
                  int64_t time, bool of_turn) {
        if (from.data) features(from, batch, time);
        for (int h = 0; h < call.heads; h++)
            for (int part = 0; part < 2; part++)
                std::memcpy(g[h] + part * F, row_of(grad, batch, h, time) + part * D,
                            D * sizeof(float));
        if (of_turn) add_gradient_of_turn();
        turn(g, -1);
        product<FULL, false>(dp, g, turned_fourier, rows, 2 * F, F);
        for (int h = 0; h < call.heads; h++) {
            for (int j = 0; call.phi && j < F; j += L::COUNT)
                L::at(dp[h] + j) *= slope_of_phi(L::at(x[h] + j), L::at(p[h] + j));
            std::memcpy(row_of(to, batch, h, time), dp[h], D * sizeof(float));
        }
    }

    // The sum of grad conj(z).
    void add_gradient_of_turn() {
        for (int h = 0; h < call.heads; h++)
            for (int j = 0; j < F; j += L::COUNT) {
                const V re = L::at(g[h] + j), im = L::at(g[h] + F + j);
                const V z_re = L::at(z[h] + j), z_im = L::at(z[h] + F + j);
                L::at(sums.data + j) += re * z_re + im * z_im;
                L::at(sums.data + F + j) += im * z_re - re * z_im;
            }
    }

    void give_turn(float *to) {
        for (int64_t j = 0; j < D; j++) to[2 * j] = sums.data[j], to[2 * j + 1] = sums.data[F + j];
        std::memset(sums.data, 0, 2 * F * sizeof(float));
    }
};

// Do something with every token: token(work, batch, time), then done(work, batch, time) where Lambda
// is another one next; last(work) once for every thread. at: turn or order, (batch, time); the stride
// of batch is 0 where all share it.
template <typename Work, typename Token, typename Done, typename Last>
void each(const Call &call, const float *p, const Tensor &at, Token token, Done done, Last last) {
#pragma omp parallel num_threads(int(call.threads))
    {
        const auto work = std::make_unique<Work>(call, p);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < call.time; t++)
            for (int64_t b = 0; b < call.batch; b++) {
                if (b == 0 || at.batch) work->stand_at(at, b, t);
                token(*work, b, t);
                if (b == call.batch - 1 || at.batch) done(*work, b, t);
            }
        last(*work);
    }
}

template <typename Work>
void forward(const Call &call, const Tensor *x, const float *p) {
    each<Work>(
        call, p, x[2], [&](Work &work, int64_t b, int64_t t) { work.forward(x[0], x[1], b, t); },
        [](Work &, int64_t, int64_t) {}, [](Work &) {});
}

template <typename Work, typename Last>
void backward(const Call &call, const Tensor *x, const float *p, Last last) {
    const bool of_turn = x[4].data;
    each<Work>(
        call, p, x[2],
        [&](Work &work, int64_t b, int64_t t) { work.backward(x[0], x[1], x[3], b, t, of_turn); },
        [&](Work &work, int64_t b, int64_t t) {
            if (of_turn) work.give_turn(row_of(x[4], b, 0, t));
        },
        last);
}

}  // namespace

// x: x, out, turn or order (batch, 1, time). unit: of a reflection, or null.
extern "C" void encode_forward(const Call *call, const Tensor *x, const float *unit) {
    forward<Rows>(*call, x, unit);
}

// x: x (none where neither phi nor a parameter asks for it), the gradient of out, turn or order,
// that of x, that of turn or none. grad_units: zeros (threads, width), whose sum is that of unit, or
// null.
extern "C" void encode_backward(const Call *call, const Tensor *x, const float *unit,
                                float *grad_units) {
    backward<Rows>(*call, x, unit, [&](Rows &rows) {
        if (grad_units)
            std::memcpy(grad_units + omp_get_thread_num() * call->width, rows.sum_u.data,
                        call->width * sizeof(float));
    });
}

// The same where P is a Fourier matrix: its real and imaginary parts, (width, 2 width).
extern "C" void fourier_forward(const Call *call, const Tensor *x, const float *matrix) {
    forward<Spectra>(*call, x, matrix);
}

extern "C" void fourier_backward(const Call *call, const Tensor *x, const float *matrix, float *) {
    backward<Spectra>(*call, x, matrix, [](Spectra &) {});
}
