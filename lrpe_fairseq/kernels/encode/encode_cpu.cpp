// phi, P and Lambda on a CPU, token by token, in float32; encode_cpu.py compiles, loads and calls this.
//
// Each row of a head is read once and its features are written once. The backward pass recomputes
// intermediate results from x.
//
// Names: p = phi(x), permuted if P is odd-even; u is the unit vector of a reflection and z the
// reflection of p; turn = exp(i s theta), one complex number for each pair (2j, 2j + 1) or, in the
// wide form, for each feature, which doubles the width; order holds the indices of a permutation. With
// a Fourier matrix P all heads of a token are transformed in one product.

#include <omp.h>

#include "products.h"

typedef const float *Floats;
typedef float *Sums;

// turned: complex numbers in a row of turn; the remaining features are unchanged. at: turn, as pairs of
// floats, or order, (batch, 1, time); its batch stride is 0 if all sequences share it. p: u of a
// reflection, the real and imaginary parts (width, 2 width) of a Fourier matrix, or null.
// The backward pass reads grad and x, and writes grad_x, grad_at and grad_units; x, grad_at and
// grad_units may be null. grad_units (threads, width) must be zero before; its sum over threads is the
// gradient of u.
#define CALL_FIELDS(F)        \
    F(Call, int64_t, batch)   \
    F(Call, int64_t, heads)   \
    F(Call, int64_t, time)    \
    F(Call, int64_t, width)   \
    F(Call, int64_t, turned)  \
    F(Call, int64_t, phi)     \
    F(Call, int64_t, halves)  \
    F(Call, int64_t, wide)    \
    F(Call, int64_t, permutes)\
    F(Call, int64_t, threads) \
    F(Call, Floats, p)        \
    F(Call, Sums, grad_units) \
    F(Call, Tensor, x)        \
    F(Call, Tensor, out)      \
    F(Call, Tensor, at)       \
    F(Call, Tensor, grad)     \
    F(Call, Tensor, grad_x)   \
    F(Call, Tensor, grad_at)
DEFINE_STRUCT(Call, CALL_FIELDS, call_fields)

namespace {

using L = Lanes<float>;
using V = L::Vector;
typedef int32_t Integers __attribute__((vector_size(BYTES)));

// e^x for x <= 0, accurate to two units in the last place. Results below 2^-126 become 2^-126.
inline V exponential(V x) {
    const V lowest = V{} - 87.336f;
    x = x < lowest ? lowest : x;
    const V magic = V{} + 12582912.0f;  // 1.5 2^23: adding it rounds to an integer
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

// Exchange the elements of every pair (a, b).
template <int... J>
inline V swapped(V x, std::integer_sequence<int, J...>) {
    return __builtin_shufflevector(x, x, (J ^ 1)...);
}
inline V swapped(V x) { return swapped(x, ORDER); }

// The address of a row; null if x has no data.
template <typename T = float>
T *row_of(const Tensor &x, int64_t batch, int64_t head, int64_t time) {
    if (!x.data) return nullptr;
    return static_cast<T *>(x.data) + batch * x.batch + head * x.head + time * x.time;
}

// `count` heads of one token, from the head `first` on.
struct Heads {
    int64_t batch, time, first;
    int count;
};

// Zero a row from its width to the end of its last vector, which may contain a NaN of another row.
inline void fill_up(float *row, int64_t width) {
    for (int64_t j = width; j < L::filled(width); j++) row[j] = 0;
}

// Copy `width` numbers from `offset` on, of each head's row of x, into a matrix; `write` copies back.
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

// Work of one thread on the heads of one token. Each step is done for all heads before the next step,
// so that the processor does not wait for the sums of one row.
struct Rows {
    static constexpr int AT_ONCE = 16;  // heads, so that their rows fit the L1 cache
    const Call &call;
    const int D, F;  // F: D, padded to whole vectors
    const bool reflects;
    Workspace<float> space;
    Matrix<float> f, p, z;  // f = phi(x) or x, in the order of x; equal matrices share memory
    Matrix<float> g, imaginary;  // gradients; the second half of wide rows
    Matrix<float> u, along, across;  // Lambda z = along z + across swapped(z); wide: both times z
    Matrix<float> sum_re, sum_im, sum_u;

    explicit Rows(const Call &call)
        : call(call), D(int(call.width)), F(L::filled(D)), reflects(call.p),
          space(5 * AT_ONCE * F + 6 * F) {
        for (Matrix<float> *rows : {&f, &p, &z, &g, &imaginary}) *rows = space.matrix(AT_ONCE, F);
        for (Matrix<float> *row : {&u, &along, &across, &sum_re, &sum_im, &sum_u})
            *row = space.matrix(1, F);
        space.clear();
        if (!call.halves) p = f;
        if (!reflects) z = p;
        if (reflects) copy(u.data, call.p, D);
        for (int j = 0; j < F; j++) along.data[j] = 1;  // 1 + 0i for the features from E on
    }

    // Read turn at (batch, time).
    void stand_at(int64_t batch, int64_t time) {
        if (call.permutes) return;
        const float *turn = row_of<const float>(call.at, batch, 0, time);
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

    // Call work(heads) for all heads of a token, with at most AT_ONCE heads per call.
    template <typename Work>
    void in_parts(int64_t batch, int64_t time, Work work) {
        for (int64_t first = 0; first < call.heads; first += AT_ONCE)
            work(Heads{batch, time, first, int(std::min<int64_t>(AT_ONCE, call.heads - first))});
    }

    // Call work(h, j) for every vector of the first `count` rows.
    template <typename Work>
    void every(int count, Work work) {
        for (int h = 0; h < count; h++)
            for (int j = 0; j < F; j += L::COUNT) work(h, j);
    }

    void features_before_reflection(Heads of) {
        read(f, call.x, of, 0, D);
        if (call.phi) every(of.count, [&](int h, int j) { f.at(h, j) = phi(f.at(h, j)); });
        for (int h = 0; call.halves && h < of.count; h++)
            for (int j = 0; j < D / 2; j++) p[h][2 * j] = f[h][j], p[h][2 * j + 1] = f[h][D / 2 + j];
    }

    // to = y - 2 u (u . y)
    void reflect(Matrix<float> to, Matrix<float> y, int count) {
        for (int h = 0; h < count; h++) {
            const float by = -2 * dot(y[h], u.data, F);
            for (int j = 0; j < F; j += L::COUNT) to.at(h, j) = y.at(h, j) + by * u.at(0, j);
        }
    }

    void features(Heads of) {
        features_before_reflection(of);
        if (reflects) reflect(z, p, of.count);
    }

    void forward(int64_t batch, int64_t time) {
        in_parts(batch, time, [&](Heads of) { forward(of); });
    }

    void forward(Heads of) {
        features(of);
        if (call.permutes) {
            permute(of);
            return;
        }
        if (call.wide) {
            every(of.count, [&](int h, int j) {
                imaginary.at(h, j) = z.at(h, j) * across.at(0, j), z.at(h, j) *= along.at(0, j);
            });
            write(imaginary, call.out, of, D, D);
        } else {
            every(of.count, [&](int h, int j) {
                z.at(h, j) = z.at(h, j) * along.at(0, j) + swapped(z.at(h, j)) * across.at(0, j);
            });
        }
        write(z, call.out, of, 0, D);
    }

    void permute(Heads of) {
        for (int h = 0; h < of.count; h++) {
            const auto *own = row_of<const int64_t>(call.at, of.batch, of.first + h, of.time);
            float *to = row_of(call.out, of.batch, of.first + h, of.time);
            for (int j = 0; j < D; j++) to[j] = z[h][own[j]];
        }
    }

    void backward(int64_t batch, int64_t time) {
        in_parts(batch, time, [&](Heads of) { backward(of); });
    }

    // Compute grad_x, and add the gradients of turn and u to their sums.
    void backward(Heads of) {
        if (call.grad_at.data)
            features(of);
        else if (call.x.data)
            features_before_reflection(of);
        turn_back(of);
        for (int h = 0; call.grad_units && h < of.count; h++) {
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
        write(done, call.grad_x, of, 0, D);
    }

    // g = Lambda^H grad, the gradient of z. The gradient of turn is grad conj(z).
    void turn_back(Heads of) {
        if (call.permutes) {
            permute_back(of);
            return;
        }
        read(g, call.grad, of, 0, D);
        if (call.wide) read(imaginary, call.grad, of, D, D);
        if (call.grad_at.data) add_gradient_of_turn(of.count);
        if (call.wide)
            every(of.count, [&](int h, int j) {
                g.at(h, j) = g.at(h, j) * along.at(0, j) + imaginary.at(h, j) * across.at(0, j);
            });
        else
            every(of.count, [&](int h, int j) {
                g.at(h, j) = g.at(h, j) * along.at(0, j) - swapped(g.at(h, j)) * across.at(0, j);
            });
    }

    void permute_back(Heads of) {
        for (int h = 0; h < of.count; h++) {
            const auto *own = row_of<const int64_t>(call.at, of.batch, of.first + h, of.time);
            const float *from = row_of(call.grad, of.batch, of.first + h, of.time);
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

    // Write the sums for turn at (batch, time), as pairs (re, im), and reset them.
    void give_turn(int64_t batch, int64_t time) {
        float *to = row_of(call.grad_at, batch, 0, time);
        const float *re = sum_re.data, *im = sum_im.data;
        for (int64_t j = 0; j < call.turned; j++) {
            to[2 * j] = call.wide ? re[j] : re[2 * j] + re[2 * j + 1];
            to[2 * j + 1] = call.wide ? im[j] : im[2 * j + 1] - im[2 * j];
        }
        for (Matrix<float> sum : {sum_re, sum_im}) std::memset(sum.data, 0, F * sizeof(float));
    }
};

// As Rows, for a Fourier matrix P and a unitary Lambda: all heads of a token in one product.
struct Spectra {
    const Call &call;
    const int64_t D;
    const int F, rows;  // D and the number of heads, padded
    Workspace<float> space;
    Matrix<float> p, z, g, dp;              // z = p F and its gradient: real, then imaginary parts
    Matrix<float> fourier, turned_fourier;  // (F, 2F), and its transpose
    Matrix<float> along, across, sums;

    explicit Spectra(const Call &call)
        : call(call), D(call.width), F(L::filled(call.width)),
          rows(int((call.heads + ROWS - 1) / ROWS * ROWS)),
          space(6 * int64_t(rows) * F + 4 * F * F + 4 * F) {
        p = space.matrix(rows, F), dp = space.matrix(rows, F);
        z = space.matrix(rows, 2 * F), g = space.matrix(rows, 2 * F);
        fourier = space.matrix(F, 2 * F), turned_fourier = space.matrix(2 * F, F);
        along = space.matrix(1, F), across = space.matrix(1, F), sums = space.matrix(1, 2 * F);
        space.clear();
        for (int i = 0; i < D; i++)
            for (int part = 0; part < 2; part++)
                for (int j = 0; j < D; j++)
                    fourier[i][part * F + j] = turned_fourier[part * F + j][i] =
                        call.p[(2 * i + part) * D + j];
    }

    Matrix<float> imaginary(Matrix<float> y) const { return {y.data + F, y.row}; }

    void stand_at(int64_t batch, int64_t time) {
        const float *turn = row_of<const float>(call.at, batch, 0, time);
        for (int64_t j = 0; j < D; j++) along.data[j] = turn[2 * j], across.data[j] = turn[2 * j + 1];
    }

    Heads heads(int64_t batch, int64_t time) const { return {batch, time, 0, int(call.heads)}; }

    // Compute p and z of a token.
    void features(int64_t batch, int64_t time) {
        read(p, call.x, heads(batch, time), 0, D);
        for (int h = 0; call.phi && h < call.heads; h++)
            for (int j = 0; j < F; j += L::COUNT) p.at(h, j) = phi(p.at(h, j));
        product<FULL, false>(z, p, fourier, rows, int(D), 2 * F);
    }

    // Multiply every row by turn or by its conjugate.
    void turn(Matrix<float> y, float sign) {
        for (int h = 0; h < call.heads; h++)
            for (int j = 0; j < F; j += L::COUNT) {
                V &re = y.at(h, j), &im = y.at(h, F + j);
                const V real = re, by = sign * across.at(0, j);
                re = real * along.at(0, j) - im * by;
                im = real * by + im * along.at(0, j);
            }
    }

    void forward(int64_t batch, int64_t time) {
        features(batch, time);
        turn(z, 1);
        write(z, call.out, heads(batch, time), 0, D);
        write(imaginary(z), call.out, heads(batch, time), D, D);
    }

    void backward(int64_t batch, int64_t time) {
        if (call.x.data) features(batch, time);
        read(g, call.grad, heads(batch, time), 0, D);
        read(imaginary(g), call.grad, heads(batch, time), D, D);
        if (call.grad_at.data) add_gradient_of_turn();
        turn(g, -1);
        product<FULL, false>(dp, g, turned_fourier, rows, 2 * F, F);
        for (int h = 0; call.phi && h < call.heads; h++)
            for (int j = 0; j < F; j += L::COUNT) dp.at(h, j) *= slope_of_phi(p.at(h, j));
        write(dp, call.grad_x, heads(batch, time), 0, D);
    }

    // Add grad conj(z) to the sums.
    void add_gradient_of_turn() {
        for (int h = 0; h < call.heads; h++)
            for (int j = 0; j < F; j += L::COUNT) {
                const V re = g.at(h, j), im = g.at(h, F + j);
                const V z_re = z.at(h, j), z_im = z.at(h, F + j);
                sums.at(0, j) += re * z_re + im * z_im;
                sums.at(0, F + j) += im * z_re - re * z_im;
            }
    }

    void give_turn(int64_t batch, int64_t time) {
        float *to = row_of(call.grad_at, batch, 0, time);
        for (int64_t j = 0; j < D; j++) to[2 * j] = sums.data[j], to[2 * j + 1] = sums.data[F + j];
        std::memset(sums.data, 0, 2 * F * sizeof(float));
    }
};

// Call token(work, batch, time) for every token, done(work, batch, time) after the last token with the
// same Lambda, and last(work) once per thread.
template <typename Work, typename Token, typename Done, typename Last>
void each(const Call &call, Token token, Done done, Last last) {
#pragma omp parallel num_threads(int(call.threads))
    {
        const auto work = std::make_unique<Work>(call);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < call.time; t++)
            for (int64_t b = 0; b < call.batch; b++) {
                if (b == 0 || call.at.batch) work->stand_at(b, t);
                token(*work, b, t);
                if (b == call.batch - 1 || call.at.batch) done(*work, b, t);
            }
        last(*work);
    }
}

template <typename Work>
void forward(const Call &call) {
    each<Work>(
        call, [](Work &work, int64_t b, int64_t t) { work.forward(b, t); },
        [](Work &, int64_t, int64_t) {}, [](Work &) {});
}

template <typename Work, typename Last>
void backward(const Call &call, Last last) {
    each<Work>(
        call, [](Work &work, int64_t b, int64_t t) { work.backward(b, t); },
        [&](Work &work, int64_t b, int64_t t) {
            if (call.grad_at.data) work.give_turn(b, t);
        },
        last);
}

}  // namespace

extern "C" void encode_forward(const Call *call) { forward<Rows>(*call); }

extern "C" void encode_backward(const Call *call) {
    backward<Rows>(*call, [&](Rows &rows) {
        if (call->grad_units)
            std::memcpy(call->grad_units + omp_get_thread_num() * call->width, rows.sum_u.data,
                        call->width * sizeof(float));
    });
}

// Entry points for a Fourier matrix P.
extern "C" void fourier_forward(const Call *call) { forward<Spectra>(*call); }

extern "C" void fourier_backward(const Call *call) {
    backward<Spectra>(*call, [](Spectra &) {});
}
