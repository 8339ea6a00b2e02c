// Stands in for ssh, the agent of a host and its ranks, for `make growth`: what they
// say to the launcher and to its store, and no Python.
//
//     stand_in FOLDER CASE SECONDS -- HOST COMMAND
//
// It reads the header of an agent, joins the store, and asks for its orders by requests
// that the store holds until there is another one, for five seconds at most. It sends
// the heartbeat of an agent each second, and from the order `run` on one for each rank
// every five seconds, as the ranks' watchdogs do. The order `stop`
// ends the ranks, with a report, and `exit` the agent. So many seconds after the order
// `run`, in the case
//     end    the ranks end well, with a report;
//     fail   the host "h0" reports that a rank has failed;
//     lose   the host "h0" falls silent.
// FOLDER/HOST gets a line for each thing that happens, with its time, and the bytes
// that it has sent and received.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

static const double kLookSeconds = 0.1, kBeatSeconds = 1, kRankSeconds = 5;
static std::string address, port, token, key, id;
static std::atomic<long> sent(0), received(0);
static FILE* record;

// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), by which values in the store are signed. Its
// constants are the fractions of square and cube roots of the first primes.
static std::string sha256(std::string text) {
  static uint32_t k[64], first[8];
  if (!k[0]) {
    int found = 0;
    for (int n = 2; found < 64; ++n) {
      bool is_prime = true;
      for (int d = 2; d * d <= n; ++d) is_prime &= n % d != 0;
      if (!is_prime) continue;
      auto root = [n](int power) {  // floor(n^(1 / power) * 2^32), by bisection
        unsigned __int128 low = 0, high = (unsigned __int128)n << 32;
        while (low + 1 < high) {
          unsigned __int128 x = (low + high) / 2;  // below 2^42: its cube fits
          bool is_more = power == 2 ? x * x > (unsigned __int128)n << 64
                                    : x * x * x > (unsigned __int128)n << 96;
          (is_more ? high : low) = x;
        }
        return uint32_t(low);
      };
      if (found < 8) first[found] = root(2);
      k[found++] = root(3);
    }
  }
  uint32_t h[8];
  memcpy(h, first, sizeof h);
  uint64_t bits = text.size() * 8ull;
  text += char(0x80);
  while (text.size() % 64 != 56) text += char(0);
  for (int shift = 56; shift >= 0; shift -= 8) text += char(bits >> shift);
  auto turn = [](uint32_t x, int n) { return x >> n | x << (32 - n); };
  for (size_t begin = 0; begin < text.size(); begin += 64) {
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; ++i) {
      w[i] = 0;
      for (int b = 0; b < 4; ++b) w[i] = w[i] << 8 | uint8_t(text[begin + 4 * i + b]);
    }
    for (int i = 16; i < 64; ++i) {
      uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) + w[i - 7] +
             (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
    }
    memcpy(v, h, sizeof v);
    for (int i = 0; i < 64; ++i) {
      uint32_t one = v[7] + (turn(v[4], 6) ^ turn(v[4], 11) ^ turn(v[4], 25)) +
                     ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[i] + w[i];
      uint32_t two = (turn(v[0], 2) ^ turn(v[0], 13) ^ turn(v[0], 22)) +
                     ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
      memmove(v + 1, v, 7 * sizeof *v);
      v[4] += one;
      v[0] = one + two;
    }
    for (int i = 0; i < 8; ++i) h[i] += v[i];
  }
  std::string digest;
  for (uint32_t word : h)
    for (int shift = 24; shift >= 0; shift -= 8) digest += char(word >> shift);
  return digest;
}

static std::string hmac(std::string secret, const std::string& text) {
  if (secret.size() > 64) secret = sha256(secret);
  secret.resize(64);
  std::string inner = secret, outer = secret;
  for (int i = 0; i < 64; ++i) inner[i] ^= 0x36, outer[i] ^= 0x5c;
  return sha256(outer + sha256(inner + text));
}

static std::string hexadecimal(const std::string& bytes) {
  std::string text;
  char two[3];
  for (unsigned char byte : bytes) {
    snprintf(two, sizeof two, "%02x", byte);
    text += two;
  }
  return text;
}

// As `derived` in signing.py.
static std::string derived(const std::string& secret, const std::string& purpose) {
  return hexadecimal(hmac(secret, purpose).substr(0, 16));
}

static double now() {
  timeval time;
  gettimeofday(&time, nullptr);
  return time.tv_sec + time.tv_usec * 1e-6;
}

static void note(const char* what) {
  fprintf(record, "%s %.6f\n", what, now());
  fflush(record);
}

// The text between `"name": ` and the next comma or brace, without quotes.
static std::string field(const std::string& message, const std::string& name) {
  size_t begin = message.find("\"" + name + "\": ");
  if (begin == std::string::npos) return "";
  begin += name.size() + 4;
  std::string text = message.substr(begin, message.find_first_of(",}", begin) - begin);
  return text[0] == '"' ? text.substr(1, text.size() - 2) : text;
}

// The body of the answer; empty if there is none.
static std::string asked(const std::string& method, const std::string& path,
                         const std::string& value, const std::string& headers = "") {
  std::string request = method + " /" + path + " HTTP/1.1\r\nHost: " + address + ":" +
                        port + "\r\nAccept-Encoding: identity\r\n" + headers +
                        "Content-Length: " +
                        std::to_string(value.size()) + "\r\n\r\n" + value;
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(atoi(port.c_str()));
  inet_pton(AF_INET, address.c_str(), &to.sin_addr);
  int link = socket(AF_INET, SOCK_STREAM, 0);
  timeval limit = {headers.empty() ? 2 : 7, 0};
  setsockopt(link, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  std::string all;
  if (connect(link, (sockaddr*)&to, sizeof to) == 0 &&
      write(link, request.data(), request.size()) == (ssize_t)request.size()) {
    sent += request.size();
    char answer[65536];
    ssize_t count;
    while ((count = read(link, answer, sizeof answer)) > 0) all.append(answer, count);
    received += all.size();
  }
  close(link);
  size_t head = all.find("\r\n\r\n");
  bool is_ok = all.find(" 200 ") < 20 && head != std::string::npos;
  return is_ok ? all.substr(head + 4) : "";
}

static std::string path_of(const std::string& of, const std::string& name) {
  return of + ":" + port + "/keras_dist_watch/" + name;
}

static void put(const std::string& name, const std::string& value) {
  asked("PUT", path_of(token, name), hmac(key, name + "\n" + value) + value);
}

// As `StoreClient.follow`: what was ordered last, for the other threads.
static std::mutex mutex;
static std::string ordered;

static void follow() {
  std::string known;
  for (;;) {
    std::string headers = "Prefer: wait=5\r\nIf-None-Match: " + known + "\r\n";
    std::string found = asked("GET", path_of(token, "order." + id), "", headers);
    if (found.size() <= 32) continue;  // the same, or none
    known = hexadecimal(sha256(found).substr(0, 8));
    std::lock_guard<std::mutex> lock(mutex);
    ordered = found.substr(32);  // behind its signature
  }
}

static void report(const std::string& order, const std::string& failures) {
  int first = atoi(field(order, "rank").c_str());
  int ranks = atoi(field(order, "local_size").c_str());
  std::string where;
  for (int rank = first; rank < first + ranks; ++rank) {
    where += (where.empty() ? "\"" : ", \"") + std::to_string(rank) +
             "\": \"in step 100 of epoch 3 (script.py:42 in main)\"";
  }
  std::string finished = failures.empty() ? "true" : "false";
  put("report." + field(order, "start") + "." + id,
      "{\"failures\": [" + failures + "], \"where\": {" + where +
          "}, \"saved\": false, \"error\": \"\", \"finished\": " + finished + "}");
  note("reported");
}

static void beat_of_ranks(const std::string& run, const std::string& of, int beat,
                          const std::string& host) {
  int first = atoi(field(run, "rank").c_str());
  int ranks = atoi(field(run, "local_size").c_str());
  for (int rank = first; rank < first + ranks; ++rank) {
    asked("PUT", path_of(of, std::to_string(rank)),
          "{\"beat\": " + std::to_string(beat) +
              ", \"idle\": 0.2, \"is_with_others\": true, \"collective\": null, "
              "\"position\": \"in step 100 of epoch 3\", \"code\": null, \"host\": \"" +
              host + "\", \"pid\": 12345, \"without\": [12350, 12351, 12352]}");
  }
}

int main(int count, char** words) {
  if (count < 6) return 2;
  std::string folder = words[1], what = words[2], host = words[5];
  double seconds = atof(words[3]);
  bool is_first = host == "h0";
  record = fopen((folder + "/" + host).c_str(), "w");
  std::string message;
  char text[65536];
  ssize_t length;
  while (message.find('\n') == std::string::npos) {
    if ((length = read(0, text, sizeof text)) <= 0) return 2;
    message.append(text, length);
  }
  fprintf(record, "message %zu\n", message.size());
  note("ordered");
  address = field(message, "address");
  port = field(message, "port");
  id = field(message, "name");
  std::string secret = field(message, "secret");
  token = derived(secret, "store");
  key = derived(secret, "hosts");
  put("beat." + id, "1");
  put("join." + id,
      "{\"host\": \"" + host + "\", \"num_ranks\": 1, \"number\": null, " +
          "\"num_hosts\": " + field(message, "most") + ", \"version\": \"" + VERSION +
          "\", \"reached\": \"127.0.0.1\", \"is_quiet\": true, " +
          "\"min_hosts\": " + field(message, "least") + "}");
  std::string run, of_ranks;
  double begin = 0, beaten = now(), ranks_beaten = 0;
  bool is_over = false;
  std::thread(follow).detach();
  for (int beat = 2;;) {
    mutex.lock();
    std::string order = ordered;
    mutex.unlock();
    std::string to_do = field(order, "do");
    if (to_do == "exit") {
      put("left." + id, "true");
      fprintf(record, "sent %ld\nreceived %ld\n", sent.load(), received.load());
      fclose(record);
      return atoi(field(order, "code").c_str());
    }
    if (to_do == "run" && run.empty()) {
      run = order;
      begin = now();
      std::string name = "start " + field(order, "nonce") + " " + field(order, "start");
      of_ranks = derived(derived(secret, name), "store");
      note("there");
    }
    if ((to_do == "stop" || to_do == "save") && !is_over) {
      note("stopped");
      report(run.empty() ? order : run, "");
      is_over = true;
    }
    if (what == "lose" && is_first && begin && now() - begin > seconds) {
      note("silent");
      fclose(record);
      while (read(0, text, sizeof text) > 0) {
      }
      return 1;
    }
    if (now() - beaten > kBeatSeconds) {
      put("beat." + id, std::to_string(beat++));
      beaten = now();
    }
    if (begin && !is_over && now() - ranks_beaten > kRankSeconds) {
      beat_of_ranks(run, of_ranks, beat, host);
      ranks_beaten = now();
    }
    bool is_time = begin && !is_over && now() - begin > seconds;
    if (is_time && what == "end") {
      report(run, "");
      is_over = true;
    }
    if (is_time && what == "fail" && is_first) {
      note("failed");
      report(run, "{\"rank\": 0, \"time\": " + std::to_string(now()) +
                      ", \"code\": 3, \"summary\": \"KeyError: 'tea'\", \"text\": "
                      "\"\", \"is_secondary\": false, \"is_saved\": false}");
      is_over = true;
    }
    usleep(kLookSeconds * 1e6);
  }
}
