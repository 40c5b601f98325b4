// JSON as a manifest and the header of a safetensors file have it.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

struct Json {
  enum Kind { NONE, WORD, TEXT, LIST, OBJECT } kind = NONE;  // NONE is null; numbers are words
  std::string text;
  std::vector<Json> items;
  std::map<std::string, Json> members;

  static Json parse(const std::string& source) {
    size_t at = 0;
    return read(source, at);
  }
  const Json& operator[](const std::string& key) const {
    const auto found = members.find(key);
    if (found == members.end()) throw std::runtime_error("JSON has no \"" + key + "\"");
    return found->second;
  }
  bool has(const std::string& key) const { return members.count(key) > 0; }
  bool null() const { return kind == NONE; }
  int64_t integer() const { return std::stoll(text); }
  double number() const { return std::stod(text); }

 private:
  static char next(const std::string& s, size_t& at) {
    at = s.find_first_not_of(" \t\r\n", at);
    if (at == std::string::npos) throw std::runtime_error("JSON ends too early");
    return s[at];
  }
  static Json read(const std::string& s, size_t& at) {
    Json value;
    const char first = next(s, at);
    if (first == '{' || first == '[') {
      value.kind = first == '{' ? OBJECT : LIST;
      const char last = first == '{' ? '}' : ']';
      for (++at; next(s, at) != last; at += s[at] == ',') {
        std::string key;
        if (first == '{') {
          key = string(s, at);
          if (next(s, at) != ':') throw std::runtime_error("JSON lacks a colon");
          ++at;
        }
        Json entry = read(s, at);
        if (first == '{') value.members.emplace(key, std::move(entry));
        else value.items.push_back(std::move(entry));
        next(s, at);
      }
      ++at;
    } else if (first == '"') {
      value.kind = TEXT;
      value.text = string(s, at);
    } else {
      const size_t end = s.find_first_of(",]} \t\r\n", at);
      value.text = s.substr(at, end - at);
      value.kind = value.text == "null" ? NONE : WORD;
      if (value.text.empty()) throw std::runtime_error("JSON lacks a value");
      at = end;
    }
    return value;
  }
  static std::string string(const std::string& s, size_t& at) {
    std::string text;
    if (s[at] != '"') throw std::runtime_error("JSON lacks a string");
    for (++at; s.at(at) != '"'; ++at) {
      if (s[at] != '\\') {
        text += s[at];
        continue;
      }
      const char escaped = s.at(++at);
      const size_t place = std::string("bfnrt").find(escaped);
      if (escaped == 'u') text += utf8(code_point(s, at));
      else text += place == std::string::npos ? escaped : "\b\f\n\r\t"[place];
    }
    ++at;
    return text;
  }
  static uint32_t code_point(const std::string& s, size_t& at) {  // at the u of \u1234
    uint32_t code = std::stoul(s.substr(at + 1, 4), nullptr, 16);
    at += 4;
    if (code >> 10 == 0xD800 >> 10) {  // the first half of a character beyond 16 bits
      const uint32_t low = std::stoul(s.substr(at + 3, 4), nullptr, 16);
      code = 0x10000 + ((code & 0x3FF) << 10) + (low & 0x3FF);
      at += 6;
    }
    return code;
  }
  static std::string utf8(uint32_t code) {
    if (code < 0x80) return {char(code)};
    std::string text;
    for (; code >= (0x40u >> text.size()); code >>= 6)
      text.insert(text.begin(), char(0x80 | (code & 0x3F)));
    return char((0xFF00 >> (text.size() + 1)) | code) + text;
  }
};
