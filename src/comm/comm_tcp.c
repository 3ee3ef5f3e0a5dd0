/* comm_tcp.c - exchanges over plain sockets: ranks started by torchrun's variables (RANK,
 * WORLD_SIZE, MASTER_ADDR, MASTER_PORT), with no MPI.
 * Meeting: rank 0 listens at the master address; every other rank tells it who it is and where it
 * listens, gets the table of all, connects to the ranks below it and is called by those above.
 * A second socket between two ranks is for last words: who fails says why on it, and hears why
 * others did, so that one rank tells the cause.
 *
 * Invariants:
 *  1. One socket between two ranks serves all groups that both are in: ranks make their calls in
 *     the same order, so the bytes of a pair stay in order.
 *  2. Waiting ends: with the timeout (of the group, or MEETING_S while ranks meet), or when the
 *     other side is gone. */
#include "comm/comm_tcp.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/env.h"
#include "base/mem.h"

#define MEETING_S 300.0      /* ITH_MEETING_TIMEOUT */
#define LAST_WORDS_S 3.0     /* for the failures of other ranks */
#define RETRY_NANOS 50000000 /* between two attempts to reach rank 0 */
#define POLL_MS 1000
#define MAGIC 0x3170637468746921LL

/* What a rank says of itself when it connects; the table of all is made of these. */
typedef struct {
    int64_t magic, rank, size;
    int64_t channel; /* 0: exchanges; 1: last words */
    int64_t port;    /* where it listens */
    struct sockaddr_storage address;
    int64_t address_bytes;
    char host[64];
} greeting;

/* What a rank says when it fails. */
typedef enum { CAUSE_OWN, CAUSE_SILENCE, CAUSE_LOSS } cause;
typedef struct {
    int64_t rank, status, cause;
    char text[sizeof((ith_error *)0)->text];
} last_words;

typedef struct {
    int *sockets; /* [2 * world size], of the world's state: of exchanges, then of last words; the
                     own ones are -1 */
    cause *cause; /* of the world's state: what a failure of an exchange means */
    int64_t *members;         /* [size] world ranks of the group */
    int64_t *sent, *received; /* [size] of the running exchange */
    struct pollfd *polls;     /* [size] */
    bool is_world;
} tcp_state;

static double now_s(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

/* ---- one socket ---- */

static ith_status tune(int fd, ith_error *err)
{
    int one = 1, flags = fcntl(fd, F_GETFL, 0);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
        return ith_fail(err, ITH_ERR_IO, "socket: %s", strerror(errno));
    return ITH_OK;
}

/* Waits for events of one socket until `end`. */
static ith_status await(int fd, short events, double end, const char *what, ith_error *err)
{
    for (;;) {
        struct pollfd p = {.fd = fd, .events = events};
        int n = poll(&p, 1, POLL_MS);
        if (n > 0)
            return ITH_OK;
        if (n < 0 && errno != EINTR)
            return ith_fail(err, ITH_ERR_IO, "%s: %s", what, strerror(errno));
        if (now_s() > end)
            return ith_fail(err, ITH_ERR_RUN, "%s: no answer in time (ITH_MEETING_TIMEOUT)", what);
    }
}

/* All of `bytes`, in or out, while ranks meet. */
static ith_status transfer(int fd, void *data, int64_t bytes, bool out, double end,
                           const char *what, ith_error *err)
{
    for (int64_t done = 0; done < bytes;) {
        ITH_TRY(await(fd, out ? POLLOUT : POLLIN, end, what, err));
        char *at = (char *)data + done;
        ssize_t n = out ? send(fd, at, (size_t)(bytes - done), MSG_NOSIGNAL)
                        : recv(fd, at, (size_t)(bytes - done), 0);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            return ith_fail(err, ITH_ERR_RUN, "%s: the connection was closed", what);
        done += n > 0 ? n : 0;
    }
    return ITH_OK;
}

/* A socket that listens; port 0: any. The port is returned. */
static ith_status listen_at(int family, int64_t port, int *out, int64_t *found, ith_error *err)
{
    struct sockaddr_storage any = {.ss_family = (sa_family_t)family};
    socklen_t len = family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    struct sockaddr_in *v4 = (struct sockaddr_in *)(void *)&any;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)(void *)&any;
    int one = 1, fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    *(family == AF_INET6 ? &v6->sin6_port : &v4->sin_port) = htons((uint16_t)port);
    if (fd >= 0)
        (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (fd < 0 || bind(fd, (struct sockaddr *)&any, len) < 0 || listen(fd, SOMAXCONN) < 0 ||
        getsockname(fd, (struct sockaddr *)&any, &len) < 0) {
        int code = errno;
        if (fd >= 0)
            close(fd);
        return ith_fail(err, ITH_ERR_IO, "port %lld: %s (MASTER_PORT)", (long long)port,
                        strerror(code));
    }
    *found = ntohs(family == AF_INET6 ? v6->sin6_port : v4->sin_port);
    *out = fd;
    return ITH_OK;
}

/* Connects; while nobody listens there it tries again, until `end`. */
static ith_status call(const struct sockaddr *to, socklen_t len, double end, const char *what,
                       int *out, ith_error *err)
{
    for (;;) {
        int fd = socket(to->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0)
            return ith_fail(err, ITH_ERR_IO, "%s: %s", what, strerror(errno));
        if (connect(fd, to, len) == 0) {
            *out = fd;
            return ITH_OK;
        }
        int code = errno;
        close(fd);
        if (now_s() > end)
            return ith_fail(err, ITH_ERR_RUN, "%s: %s, until the end (ITH_MEETING_TIMEOUT)", what,
                            strerror(code));
        struct timespec nap = {0, RETRY_NANOS};
        nanosleep(&nap, NULL);
    }
}

/* ---- meeting ---- */

typedef struct {
    int64_t rank, size;
    const char *address, *port;
    struct addrinfo *master;
    int listener;
    greeting *all; /* [size] */
    int *sockets;  /* [2 * size] */
    double seconds, end;
} meeting;

static ith_status meeting_seconds(double *out, ith_error *err)
{
    const char *text = ith_env(ITH_ENV_MEETING_TIMEOUT);
    char *end = NULL;
    *out = text ? strtod(text, &end) : MEETING_S;
    if (text && (*end || !(*out > 0)))
        return ith_fail(err, ITH_ERR_USAGE, "ITH_MEETING_TIMEOUT: found %s (use seconds, above 0)",
                        text);
    return ITH_OK;
}

static ith_status check_greeting(const meeting *m, const greeting *g, ith_error *err)
{
    if (g->magic != MAGIC)
        return ith_fail(err, ITH_ERR_RUN,
                        "%s:%s: what called is no rank of this job (MASTER_PORT of its own?)",
                        m->address, m->port);
    if (g->size != m->size || g->rank < 0 || g->rank >= m->size)
        return ith_fail(err, ITH_ERR_USAGE,
                        "RANK: rank %lld of %lld called, this job has WORLD_SIZE=%lld",
                        (long long)g->rank, (long long)g->size, (long long)m->size);
    if (g->channel < 0 || g->channel > 1 || m->sockets[g->channel * m->size + g->rank] >= 0 ||
        g->rank == m->rank)
        return ith_fail(err, ITH_ERR_USAGE, "RANK: two processes are rank %lld",
                        (long long)g->rank);
    return ITH_OK;
}

/* Takes one call; who it is goes into `all`. */
static ith_status accept_one(meeting *m, ith_error *err)
{
    greeting g = {0};
    struct sockaddr_storage from = {0};
    socklen_t len = sizeof from;
    ITH_TRY(await(m->listener, POLLIN, m->end, "waiting for the other ranks", err));
    int fd = accept(m->listener, (struct sockaddr *)&from, &len);
    if (fd < 0)
        return ith_fail(err, ITH_ERR_IO, "accept: %s", strerror(errno));
    ith_status status = tune(fd, err);
    if (status == ITH_OK)
        status = transfer(fd, &g, sizeof g, false, m->end, "greeting of a rank", err);
    if (status == ITH_OK)
        status = check_greeting(m, &g, err);
    if (status != ITH_OK) {
        close(fd);
        return status;
    }
    g.host[sizeof g.host - 1] = '\0';
    g.address = from;
    g.address_bytes = len;
    m->all[g.rank] = g;
    m->sockets[g.channel * m->size + g.rank] = fd;
    return ITH_OK;
}

static ith_status call_rank(meeting *m, int64_t rank, const struct sockaddr *to, socklen_t len,
                            ith_error *err)
{
    char what[64];
    snprintf(what, sizeof what, "rank %lld", (long long)rank);
    for (int64_t channel = 0; channel < 2; channel++) {
        int *fd = &m->sockets[channel * m->size + rank];
        m->all[m->rank].channel = channel;
        ITH_TRY(call(to, len, m->end, what, fd, err));
        ITH_TRY(tune(*fd, err));
        ITH_TRY(transfer(*fd, &m->all[m->rank], sizeof *m->all, true, m->end, what, err));
    }
    return ITH_OK;
}

static ith_status meet(meeting *m, ith_error *err)
{
    int family = m->master->ai_family;
    greeting *own = &m->all[m->rank];
    int64_t port = 0;
    *own = (greeting){.magic = MAGIC, .rank = m->rank, .size = m->size};
    (void)gethostname(own->host, sizeof own->host - 1);
    if (m->rank == 0) {
        ITH_TRY(listen_at(family, strtol(m->port, NULL, 10), &m->listener, &port, err));
        for (int64_t i = 0; i < 2 * (m->size - 1); i++)
            ITH_TRY(accept_one(m, err));
        for (int64_t i = 1; i < m->size; i++)
            ITH_TRY(transfer(m->sockets[i], m->all, m->size * (int64_t)sizeof *m->all, true, m->end,
                             "table of ranks", err));
        return ITH_OK;
    }
    ITH_TRY(listen_at(family, 0, &m->listener, &own->port, err));
    ITH_TRY(call_rank(m, 0, m->master->ai_addr, m->master->ai_addrlen, err));
    ITH_TRY(transfer(m->sockets[0], m->all, m->size * (int64_t)sizeof *m->all, false, m->end,
                     "table of ranks", err));
    for (int64_t i = 1; i < m->rank; i++) {
        struct sockaddr_storage to = m->all[i].address;
        uint16_t at = htons((uint16_t)m->all[i].port);
        if (to.ss_family == AF_INET6)
            ((struct sockaddr_in6 *)(void *)&to)->sin6_port = at;
        else
            ((struct sockaddr_in *)(void *)&to)->sin_port = at;
        ITH_TRY(call_rank(m, i, (struct sockaddr *)&to, (socklen_t)m->all[i].address_bytes, err));
    }
    for (int64_t i = 0; i < 2 * (m->size - 1 - m->rank); i++)
        ITH_TRY(accept_one(m, err));
    return ITH_OK;
}

/* ---- the driver ---- */

static ith_status make_state(tcp_state **out, int64_t size, ith_error *err)
{
    tcp_state *s = NULL;
    ith_status status = ITH_OK;
    ITH_TRY(ith_alloc_zero((void **)&s, 1, sizeof *s, "TCP group", err));
    ITH_TRY_OUT(
        ith_alloc_zero((void **)&s->members, 3 * size, sizeof *s->members, "TCP group", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&s->polls, size, sizeof *s->polls, "TCP group", err));
    s->sent = s->members + size;
    s->received = s->sent + size;
    *out = s;
    return ITH_OK;
out:
    ith_free(s->members);
    ith_free(s);
    return status;
}

static ith_status gone(const ith_comm *comm, int64_t j, ith_error *err)
{
    const tcp_state *s = comm->state;
    *s->cause = CAUSE_LOSS;
    return ith_fail(err, ITH_ERR_RUN, "rank %lld has left the job", (long long)s->members[j]);
}

static ith_status no_answer(const ith_comm *comm, const ith_exchange *x, ith_error *err)
{
    const tcp_state *s = comm->state;
    int64_t j = 0;
    while (j + 1 < comm->size && (j == comm->rank || (s->sent[j] == x->send_bytes[j] &&
                                                      s->received[j] == x->recv_bytes[j])))
        j++;
    *s->cause = CAUSE_SILENCE;
    return ith_fail(err, ITH_ERR_RUN, "rank %lld does not answer since %.0f s (dist_timeout)",
                    (long long)s->members[j], comm->timeout_s);
}

/* Moves what the socket of member j takes or gives now. */
static ith_status move(ith_comm *comm, const ith_exchange *x, int64_t j, short events, bool *moved,
                       ith_error *err)
{
    tcp_state *s = comm->state;
    int fd = s->sockets[s->members[j]];
    int64_t out = x->send_bytes[j] - s->sent[j], in = x->recv_bytes[j] - s->received[j];
    ssize_t n = 0;
    if (out > 0 && (events & (POLLOUT | POLLHUP | POLLERR))) {
        n = send(fd, (const char *)x->send + x->send_at[j] + s->sent[j], (size_t)out, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            return gone(comm, j, err);
        s->sent[j] += n > 0 ? n : 0;
        *moved |= n > 0;
    }
    if (in > 0 && (events & (POLLIN | POLLHUP | POLLERR))) {
        n = recv(fd, (char *)x->recv + x->recv_at[j] + s->received[j], (size_t)in, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            return gone(comm, j, err);
        s->received[j] += n > 0 ? n : 0;
        *moved |= n > 0;
    }
    return ITH_OK;
}

/* Sockets that still have something to do; returns how many. */
static int64_t fill_polls(const ith_comm *comm, const ith_exchange *x)
{
    const tcp_state *s = comm->state;
    int64_t waiting = 0;
    for (int64_t j = 0; j < comm->size; j++) {
        short events = (short)((s->sent[j] < x->send_bytes[j] ? POLLOUT : 0) |
                               (s->received[j] < x->recv_bytes[j] ? POLLIN : 0));
        bool busy = j != comm->rank && events;
        s->polls[j] =
            (struct pollfd){.fd = busy ? s->sockets[s->members[j]] : -1, .events = events};
        waiting += busy;
    }
    return waiting;
}

static ith_status tcp_exchange(ith_comm *comm, const ith_exchange *x, ith_error *err)
{
    tcp_state *s = comm->state;
    int64_t me = comm->rank;
    double last = now_s();
    ITH_ASSERT(x->send_bytes[me] == x->recv_bytes[me]);
    if (x->send_bytes[me])
        memmove((char *)x->recv + x->recv_at[me], (const char *)x->send + x->send_at[me],
                (size_t)x->send_bytes[me]);
    memset(s->sent, 0, (size_t)(2 * comm->size) * sizeof *s->sent);
    while (fill_polls(comm, x) > 0) {
        bool moved = false;
        int n = poll(s->polls, (nfds_t)comm->size, POLL_MS);
        if (n < 0 && errno != EINTR)
            return ith_fail(err, ITH_ERR_IO, "poll: %s", strerror(errno));
        for (int64_t j = 0; n > 0 && j < comm->size; j++)
            if (s->polls[j].fd >= 0 && s->polls[j].revents)
                ITH_TRY(move(comm, x, j, s->polls[j].revents, &moved, err));
        double now = now_s();
        last = moved ? now : last;
        if (comm->timeout_s > 0 && now - last > comm->timeout_s)
            return no_answer(comm, x, err);
    }
    return ITH_OK;
}

static ith_status tcp_split(ith_comm *comm, int64_t color, void **state, int64_t *rank,
                            int64_t *size, ith_error *err)
{
    tcp_state *s = comm->state, *made = NULL;
    int64_t *colors = NULL, n = 0;
    ith_status status = ITH_OK;
    ITH_TRY(ith_alloc_zero((void **)&colors, comm->size, sizeof *colors, "TCP group", err));
    ITH_TRY_OUT(ith_comm_all_gather(comm, colors, &color, sizeof color, err));
    ITH_TRY_OUT(make_state(&made, comm->size, err));
    made->sockets = s->sockets;
    made->cause = s->cause;
    for (int64_t j = 0; j < comm->size; j++) {
        if (colors[j] != color)
            continue;
        *rank = j == comm->rank ? n : *rank;
        made->members[n++] = s->members[j];
    }
    made->sent = made->members + n;
    made->received = made->sent + n;
    *state = made;
    *size = n;
out:
    ith_free(colors);
    return status;
}

static void close_sockets(const int *sockets, int64_t size)
{
    for (int64_t j = 0; j < size; j++)
        if (sockets[j] >= 0)
            close(sockets[j]);
}

static void tcp_close(ith_comm *comm)
{
    tcp_state *s = comm->state;
    if (s->is_world) {
        close_sockets(s->sockets, 2 * comm->size);
        ith_free(s->sockets);
        ith_free(s->cause);
    }
    ith_free(s->members);
    ith_free(s->polls);
    ith_free(s);
}

/* The others see the closed sockets. */
static void tcp_abort(ith_comm *comm, int exit_code)
{
    tcp_state *s = comm->state;
    (void)exit_code;
    for (int64_t j = 0; j < comm->size; j++)
        if (j != comm->rank)
            shutdown(s->sockets[s->members[j]], SHUT_RDWR);
}

/* ---- last words ---- */

/* The one of two failures that explains more. */
static const last_words *better(const last_words *a, const last_words *b)
{
    if (a->cause != b->cause)
        return a->cause < b->cause ? a : b;
    return a->rank < b->rank ? a : b;
}

/* All of one rank's words, or none: it is gone, or has said nothing until `end`. After that, what
 * came in the meantime is still heard. */
static bool hear(int fd, double end, last_words *out)
{
    char *to = (char *)out;
    for (size_t done = 0; done < sizeof *out;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        double left = end - now_s();
        if (poll(&p, 1, left > 0 ? (int)(1e3 * left) + 1 : 0) == 0)
            return false;
        ssize_t n = recv(fd, to + done, sizeof *out - done, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            return false;
        done += n > 0 ? (size_t)n : 0;
    }
    return true;
}

static bool tcp_last_words(ith_comm *comm, ith_error *err)
{
    tcp_state *s = comm->state;
    const int *channel = s->sockets + comm->size;
    last_words own = {comm->rank, err->status, *s->cause, ""}, told = own;
    int64_t speaker = comm->rank;
    double end = now_s() + LAST_WORDS_S;
    snprintf(own.text, sizeof own.text, "%s", err->text);
    told = own;
    for (int64_t j = 0; j < comm->size; j++) /* small: it fits what the kernel keeps */
        if (j != comm->rank)
            (void)!send(channel[j], &own, sizeof own, MSG_NOSIGNAL);
    comm->driver->abort(comm, 1); /* who waits for this rank hears of it */
    for (int64_t j = 0; j < comm->size; j++) {
        last_words theirs;
        if (j == comm->rank || !hear(channel[j], end, &theirs))
            continue;
        theirs.text[sizeof theirs.text - 1] = '\0';
        speaker = ith_min_i64(speaker, j);
        told = *better(&told, &theirs);
    }
    ith_error_clear(err);
    (void)ith_fail(err, (ith_status)told.status, "rank %lld: %s", (long long)told.rank, told.text);
    return speaker == comm->rank;
}

static const ith_comm_driver driver = {"tcp",     tcp_exchange, tcp_split, tcp_close,
                                       tcp_abort, NULL,         NULL,      tcp_last_words};

static ith_status find_master(meeting *m, ith_error *err)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    int code = getaddrinfo(m->address, m->port, &hints, &m->master);
    if (code != 0)
        return ith_fail(err, ITH_ERR_USAGE, "MASTER_ADDR=%s MASTER_PORT=%s: %s", m->address,
                        m->port, gai_strerror(code));
    return ITH_OK;
}

ith_status ith_comm_open_tcp(ith_comm **out, int64_t rank, int64_t size, const char *address,
                             const char *port, ith_error *err)
{
    meeting m = {.rank = rank, .size = size, .address = address, .port = port, .listener = -1};
    tcp_state *s = NULL;
    cause *cause_of = NULL;
    ith_comm *comm = NULL;
    ith_status status = ITH_OK;
    ITH_TRY_OUT(meeting_seconds(&m.seconds, err));
    m.end = now_s() + m.seconds;
    ITH_TRY_OUT(ith_alloc_zero((void **)&cause_of, 1, sizeof *cause_of, "ranks", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&m.sockets, 2 * size, sizeof *m.sockets, "ranks", err));
    for (int64_t j = 0; j < 2 * size; j++)
        m.sockets[j] = -1;
    ITH_TRY_OUT(ith_alloc_zero((void **)&m.all, size, sizeof *m.all, "ranks", err));
    ITH_TRY_OUT(find_master(&m, err));
    ITH_TRY_OUT(meet(&m, err));
    ITH_TRY_OUT(make_state(&s, size, err));
    ITH_TRY_OUT(ith_comm_wrap(&comm, &driver, s, rank, size, 0, err));
    s->is_world = true;
    s->sockets = m.sockets;
    s->cause = cause_of;
    m.sockets = NULL;
    cause_of = NULL;
    comm->local_rank = comm->local_size = 0;
    for (int64_t j = 0; j < size; j++) {
        bool near = strcmp(m.all[j].host, m.all[rank].host) == 0;
        s->members[j] = j;
        comm->local_size += near;
        comm->local_rank += near && j < rank;
    }
    *out = comm;
out:
    if (m.listener >= 0)
        close(m.listener);
    if (m.master)
        freeaddrinfo(m.master);
    if (m.sockets) {
        close_sockets(m.sockets, 2 * size);
        ith_free(m.sockets);
    }
    ith_free(cause_of);
    if (s && !comm) {
        ith_free(s->members);
        ith_free(s->polls);
        ith_free(s);
    }
    ith_free(m.all);
    return status;
}
