// Stands in for ssh, the agent of a host and its ranks, for `make growth`: what they
// say to the launcher and to its store, and no Python.
//
//     stand_in FOLDER CASE SECONDS HOST COMMAND
//
// It reads the start message, then sends the heartbeat of an agent each second, and one
// for each rank every five seconds, as the ranks' watchdogs do. The line `stop` ends
// it, with a report. So many seconds after its first heartbeat, in the case
//     end    it ends well, with a report;
//     fail   the host "h0" reports that a rank has failed, and ends with exit code 1;
//     lose   the host "h0" falls silent.
// FOLDER/HOST gets a line for each thing that happens, with its time, and the bytes
// that it has sent and received.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

static const int kBeatSeconds = 1, kRankSeconds = 5;
static std::string address, token, port;
static long sent = 0, received = 0;
static int first, ranks;
static FILE* record;

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
  if (begin == std::string::npos) exit(2);
  begin += name.size() + 4;
  std::string text = message.substr(begin, message.find_first_of(",}", begin) - begin);
  return text[0] == '"' ? text.substr(1, text.size() - 2) : text;
}

static bool put(const std::string& name, const std::string& value) {
  std::string request = "PUT /" + token + ":" + port + "/keras_dist_watch/" + name +
                        " HTTP/1.1\r\nHost: " + address + ":" + port +
                        "\r\nAccept-Encoding: identity\r\nContent-Length: " +
                        std::to_string(value.size()) + "\r\n\r\n" + value;
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(atoi(port.c_str()));
  inet_pton(AF_INET, address.c_str(), &to.sin_addr);
  int link = socket(AF_INET, SOCK_STREAM, 0);
  timeval limit = {2, 0};
  setsockopt(link, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  bool is_taken = false;
  if (connect(link, (sockaddr*)&to, sizeof to) == 0 &&
      write(link, request.data(), request.size()) == (ssize_t)request.size()) {
    sent += request.size();
    char answer[4096];
    ssize_t count, all = 0;
    while ((count = read(link, answer, sizeof answer - 1)) > 0) {
      if (all == 0) {
        answer[count] = 0;
        is_taken = std::string(answer).find(" 200 ") != std::string::npos;
      }
      all += count;
    }
    received += all;
  }
  close(link);
  return is_taken;
}

static void finish(const std::string& number, const std::string& failures, int code) {
  std::string where;
  for (int rank = first; rank < first + ranks; ++rank) {
    where += (where.empty() ? "\"" : ", \"") + std::to_string(rank) +
             "\": \"in step 100 of epoch 3 (script.py:42 in main)\"";
  }
  std::string report = "{\"failures\": [" + failures + "], \"where\": {" + where +
                       "}, \"saved\": false, \"error\": \"\"}";
  for (int attempt = 0; attempt < 5 && !put("host." + number, report); ++attempt) {
  }
  note("reported");
  fprintf(record, "sent %ld\nreceived %ld\n", sent, received);
  fclose(record);
  exit(code);
}

int main(int count, char** words) {
  if (count < 5) return 2;
  std::string folder = words[1], what = words[2], host = words[4];
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
  token = field(message, "HOROVOD_GLOO_RENDEZVOUS_ADDR");
  port = field(message, "HOROVOD_GLOO_RENDEZVOUS_PORT");
  address = token.substr(0, token.find(':'));
  token = token.substr(token.find('/') + 1);
  std::string number = field(message, "number");
  first = atoi(field(message, "rank").c_str());
  ranks = atoi(field(message, "local_size").c_str());
  double begin = 0;
  bool is_noted = false;
  for (int beat = 1;; ++beat) {
    bool is_silent = what == "lose" && is_first && begin && now() - begin > seconds;
    if (is_silent && !is_noted) {
      note("silent");
      is_noted = true;
    }
    if (!is_silent && put("beat." + number, std::to_string(beat)) && beat == 1) {
      begin = now();
      note("there");
    }
    for (int rank = first; beat % kRankSeconds == 1 && rank < first + ranks; ++rank) {
      if (is_silent) break;
      put(std::to_string(rank),
          "{\"beat\": " + std::to_string(beat) +
              ", \"idle\": 0.2, \"is_with_others\": true, \"collective\": null, "
              "\"position\": \"in step 100 of epoch 3\", \"code\": null, \"host\": \"" +
              host + "\", \"pid\": 12345, \"without\": [12350, 12351, 12352]}");
    }
    if (what == "end" && now() - begin > seconds) finish(number, "", 0);
    if (what == "fail" && is_first && now() - begin > seconds) {
      note("failed");
      finish(number,
             "{\"rank\": 0, \"time\": " + std::to_string(now()) +
                 ", \"code\": 3, \"summary\": \"KeyError: 'tea'\", \"text\": \"\", "
                 "\"is_secondary\": false, \"is_saved\": false}",
             3);
    }
    pollfd input = {0, POLLIN, 0};
    if (poll(&input, 1, kBeatSeconds * 1000) > 0) {
      received += std::max<ssize_t>(0, read(0, text, sizeof text));
      note("stopped");
      finish(number, "", 0);
    }
  }
}
