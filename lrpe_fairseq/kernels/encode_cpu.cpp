// phi, P and Lambda on a CPU, a token at a time; encode_cpu.py compiles, loads and calls this.
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

inline V slope_of_phi(V phi_of_x) { return phi_of_x > 1.0f ? V{} + 1.0f : phi_of_x; }

constexpr auto ORDER = std::make_integer_sequence<int, L::COUNT>{};

// Of pairs (a, b): (b, a).
template <int... J>
inline V swapped(V x, std::integer_sequence<int, J...>) {
    return __builtin_shufflevector(x, x, (J ^ 1)...);
}
inline V swapped(V x) { return swapped(x, ORDER); }

// Null where x is none.
template <typename T = float>
T *row_of(const Tensor &x, int64_t batch, int64_t head, int64_t time) {
    if (!x.data) return nullptr;
    return static_cast<T *>(x.data) + batch * x.batch + head * x.head + time * x.time;
}

// Some heads of one token.
struct Heads {
    int64_t batch, time, first;
    int count;
};

// Zeros from the end of a row to that of its last vector: a NaN of another row must not stay there.
inline void fill_up(float *row, int64_t width) {
    for (int64_t j = width; j < L::filled(width); j++) row[j] = 0;
}

// Rows of x in the cache, and back: ``width`` numbers from ``offset`` on.
inline void read(Matrix<float> to, const Tensor &x, Heads of, int64_t offset, int64_t width) {
    for (int h = 0; h < of.count; h++) {
        copy(to[h], row_of(x, of.batch, of.first + h, of.time) + offset, width);
        fill_up(to[h], width);
    }
}
inline void write(Matrix<float> from, const Tensor &x, Heads of, int64_t offset, int64_t width) {
    for (int h = 0; h < of.count; h++)
        copy(row_of(x, of.batch, of.first + h, of.time) + offset, from[h], width);
}

// What one thread needs for the heads of one token. A step is done for all of them before the next:
// the sums of one row need not be waited for.
struct Rows {
    static constexpr int AT_ONCE = 16;  // heads: they fit the first cache
    const Call &call;
    const int D, F;  // D, filled up to whole vectors
    const bool reflects;
    Rooms<float> rooms;
    Matrix<float> f, p, z;  // f = phi(x) or x, in the order of x; where nothing is between, they are one
    Matrix<float> g, imaginary;  // gradients, or features before they are written, of wide ones
    Matrix<float> u, along, across;  // Lambda z = along z + across swapped(z); wide: both times z
    Matrix<float> sum_re, sum_im, sum_u;
    Tensor order{};  // of a permutation

    Rows(const Call &call, const float *unit)
        : call(call), D(int(call.width)), F(L::filled(D)), reflects(unit),
          rooms(5 * AT_ONCE * F + 6 * F) {
        for (Matrix<float> *rows : {&f, &p, &z, &g, &imaginary}) *rows = rooms.matrix(AT_ONCE, F);
        for (Matrix<float> *row : {&u, &along, &across, &sum_re, &sum_im, &sum_u})
            *row = rooms.matrix(1, F);
        rooms.clear();
        if (!call.halves) p = f;
        if (!reflects) z = p;
        if (reflects) copy(u.data, unit, D);
        for (int j = 0; j < F; j++) along.data[j] = 1;  // beyond E: 1 + 0i
    }

    // Take what Lambda does at (batch, time).
    void stand_at(const Tensor &at, int64_t batch, int64_t time) {
        if (call.permutes) {
            order = at;
            return;
        }
        const float *turn = row_of<const float>(at, batch, 0, time);
        for (int64_t j = 0; j < call.turned; j++) {
            const float re = turn[2 * j], im = turn[2 * j + 1];
            if (call.wide) {
                along.data[j] = re, across.data[j] = im;
            } else {
                along.data[2 * j] = along.data[2 * j + 1] = re;
                across.data[2 * j] = -im, across.data[2 * j + 1] = im;
            }
        }
    }

    // Do work(heads) with all heads of a token, as many as fit at a time.
    template <typename Work>
    void in_parts(int64_t batch, int64_t time, Work work) {
        for (int64_t first = 0; first < call.heads; first += AT_ONCE)
            work(Heads{batch, time, first, int(std::min<int64_t>(AT_ONCE, call.heads - first))});
    }

    // Do work(h, j) with every vector of the first ``count`` rows.
    template <typename Work>
    void every(int count, Work work) {
        for (int h = 0; h < count; h++)
            for (int j = 0; j < F; j += L::COUNT) work(h, j);
    }

    void features_before_reflection(const Tensor &x, Heads of) {
        read(f, x, of, 0, D);
        if (call.phi) every(of.count, [&](int h, int j) { f.at(h, j) = phi(f.at(h, j)); });
        for (int h = 0; call.halves && h < of.count; h++)
            for (int j = 0; j < D / 2; j++) p[h][2 * j] = f[h][j], p[h][2 * j + 1] = f[h][D / 2 + j];
    }

    // to = y - 2 u (u . y), of what is within D
    void reflect(Matrix<float> to, Matrix<float> y, int count) {
        for (int h = 0; h < count; h++) {
            const float by = -2 * dot(y[h], u.data, F);
            for (int j = 0; j < F; j += L::COUNT) to.at(h, j) = y.at(h, j) + by * u.at(0, j);
        }
    }

    void features(const Tensor &x, Heads of) {
        features_before_reflection(x, of);
        if (reflects) reflect(z, p, of.count);
    }

    void forward(const Tensor &x, const Tensor &out, int64_t batch, int64_t time) {
        in_parts(batch, time, [&](Heads of) { forward(x, out, of); });
    }

    void forward(const Tensor &x, const Tensor &out, Heads of) {
        features(x, of);
        if (call.permutes) {
            permute(out, of);
            return;
        }
        if (call.wide) {
            every(of.count, [&](int h, int j) {
                imaginary.at(h, j) = z.at(h, j) * across.at(0, j), z.at(h, j) *= along.at(0, j);
            });
            write(imaginary, out, of, D, D);
        } else {
            every(of.count, [&](int h, int j) {
                z.at(h, j) = z.at(h, j) * along.at(0, j) + swapped(z.at(h, j)) * across.at(0, j);
            });
        }
        write(z, out, of, 0, D);
    }

    void permute(const Tensor &out, Heads of) {
        for (int h = 0; h < of.count; h++) {
            const auto *own = row_of<const int64_t>(order, of.batch, of.first + h, of.time);
            float *to = row_of(out, of.batch, of.first + h, of.time);
            for (int j = 0; j < D; j++) to[j] = z[h][own[j]];
        }
    }

    void backward(const Tensor &x, const Tensor &grad, const Tensor &to, int64_t batch, int64_t time,
                  bool of_turn) {
        in_parts(batch, time, [&](Heads of) { backward(x, grad, to, of, of_turn); });
    }

    // From the gradient of the features that of x; those of turn and u are added to the sums.
    void backward(const Tensor &x, const Tensor &grad, const Tensor &to, Heads of, bool of_turn) {
        if (of_turn)
            features(x, of);
        else if (x.data)
            features_before_reflection(x, of);
        turn_back(grad, of, of_turn);
        for (int h = 0; call.of_unit && h < of.count; h++) {
            add(sum_u.data, g[h], -2 * dot(u.data, p[h], F), F);
            add(sum_u.data, p[h], -2 * dot(u.data, g[h], F), F);
        }
        if (reflects) reflect(g, g, of.count);
        const Matrix<float> done = call.halves ? p : g;
        for (int h = 0; call.halves && h < of.count; h++)
            for (int j = 0; j < D / 2; j++)
                done[h][j] = g[h][2 * j], done[h][D / 2 + j] = g[h][2 * j + 1];
        if (call.phi)
            every(of.count, [&](int h, int j) { done.at(h, j) *= slope_of_phi(f.at(h, j)); });
        write(done, to, of, 0, D);
    }

    // g = Lambda^H grad, the gradient of z; that of turn is grad conj(z).
    void turn_back(const Tensor &grad, Heads of, bool of_turn) {
        if (call.permutes) {
            permute_back(grad, of);
            return;
        }
        read(g, grad, of, 0, D);
        if (call.wide) read(imaginary, grad, of, D, D);
        if (of_turn) add_gradient_of_turn(of.count);
        if (call.wide)
            every(of.count, [&](int h, int j) {
                g.at(h, j) = g.at(h, j) * along.at(0, j) + imaginary.at(h, j) * across.at(0, j);
            });
        else
            every(of.count, [&](int h, int j) {
                g.at(h, j) = g.at(h, j) * along.at(0, j) - swapped(g.at(h, j)) * across.at(0, j);
            });
    }

    void permute_back(const Tensor &grad, Heads of) {
        for (int h = 0; h < of.count; h++) {
            const auto *own = row_of<const int64_t>(order, of.batch, of.first + h, of.time);
            const float *from = row_of(grad, of.batch, of.first + h, of.time);
            for (int j = 0; j < D; j++) g[h][own[j]] = from[j];
            fill_up(g[h], D);
        }
    }

    void add_gradient_of_turn(int count) {
        for (int j = 0; j < F; j += L::COUNT) {
            V re = sum_re.at(0, j), other = sum_im.at(0, j);
            for (int h = 0; h < count; h++) {
                re += g.at(h, j) * z.at(h, j);
                other += call.wide ? imaginary.at(h, j) * z.at(h, j) : g.at(h, j) * swapped(z.at(h, j));
            }
            sum_re.at(0, j) = re, sum_im.at(0, j) = other;
        }
    }

    // Hand the sums over turn out, (re, im) by (re, im), and begin anew.
    void give_turn(float *to) {
        const float *re = sum_re.data, *im = sum_im.data;
        for (int64_t j = 0; j < call.turned; j++) {
            to[2 * j] = call.wide ? re[j] : re[2 * j] + re[2 * j + 1];
            to[2 * j + 1] = call.wide ? im[j] : im[2 * j + 1] - im[2 * j];
        }
        for (Matrix<float> sum : {sum_re, sum_im}) std::memset(sum.data, 0, F * sizeof(float));
    }
};

// What one thread needs for all heads of one token, where P is a Fourier matrix and Lambda unitary.
struct Spectra {
    const Call &call;
    const int64_t D;
    const int F, rows;  // D and the heads, filled up
    Rooms<float> rooms;
    Matrix<float> p, z, g, dp;              // z = p F and its gradient: real parts, imaginary parts
    Matrix<float> fourier, turned_fourier;  // (F, 2F), and the other way round
    Matrix<float> along, across, sums;

    Spectra(const Call &call, const float *matrix)
        : call(call), D(call.width), F(L::filled(call.width)),
          rows(int((call.heads + ROWS - 1) / ROWS * ROWS)),
          rooms(6 * int64_t(rows) * F + 4 * F * F + 4 * F) {
        p = rooms.matrix(rows, F), dp = rooms.matrix(rows, F);
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

    Matrix<float> imaginary(Matrix<float> y) const { return {y.data + F, y.row}; }

    void stand_at(const Tensor &at, int64_t batch, int64_t time) {
        const float *turn = row_of<const float>(at, batch, 0, time);
        for (int64_t j = 0; j < D; j++) along.data[j] = turn[2 * j], across.data[j] = turn[2 * j + 1];
    }

    Heads heads(int64_t batch, int64_t time) const { return {batch, time, 0, int(call.heads)}; }

    // p and z of a token.
    void features(const Tensor &x, int64_t batch, int64_t time) {
        read(p, x, heads(batch, time), 0, D);
        for (int h = 0; call.phi && h < call.heads; h++)
            for (int j = 0; j < F; j += L::COUNT) p.at(h, j) = phi(p.at(h, j));
        product<FULL, false>(z, p, fourier, rows, int(D), 2 * F);
    }

    // Every row times turn, or times its conjugate.
    void turn(Matrix<float> y, float sign) {
        for (int h = 0; h < call.heads; h++)
            for (int j = 0; j < F; j += L::COUNT) {
                V &re = y.at(h, j), &im = y.at(h, F + j);
                const V real = re, by = sign * across.at(0, j);
                re = real * along.at(0, j) - im * by;
                im = real * by + im * along.at(0, j);
            }
    }

    void forward(const Tensor &from, const Tensor &to, int64_t batch, int64_t time) {
        features(from, batch, time);
        turn(z, 1);
        write(z, to, heads(batch, time), 0, D);
        write(imaginary(z), to, heads(batch, time), D, D);
    }

    void backward(const Tensor &from, const Tensor &grad, const Tensor &to, int64_t batch,
                  int64_t time, bool of_turn) {
        if (from.data) features(from, batch, time);
        read(g, grad, heads(batch, time), 0, D);
        read(imaginary(g), grad, heads(batch, time), D, D);
        if (of_turn) add_gradient_of_turn();
        turn(g, -1);
        product<FULL, false>(dp, g, turned_fourier, rows, 2 * F, F);
        for (int h = 0; call.phi && h < call.heads; h++)
            for (int j = 0; j < F; j += L::COUNT) dp.at(h, j) *= slope_of_phi(p.at(h, j));
        write(dp, to, heads(batch, time), 0, D);
    }

    // The sum of grad conj(z).
    void add_gradient_of_turn() {
        for (int h = 0; h < call.heads; h++)
            for (int j = 0; j < F; j += L::COUNT) {
                const V re = g.at(h, j), im = g.at(h, F + j);
                const V z_re = z.at(h, j), z_im = z.at(h, F + j);
                sums.at(0, j) += re * z_re + im * z_im;
                sums.at(0, F + j) += im * z_re - re * z_im;
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
