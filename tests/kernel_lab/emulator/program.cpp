// PTX text, as LLVM and Triton's inline assembly write it, into a list of instructions.
#include <cctype>
#include <cstdlib>
#include <sstream>

#include "machine.h"

namespace ptx {

std::vector<std::string> parts_of(const std::string& opcode) {
  std::vector<std::string> parts;
  std::stringstream stream(opcode);
  for (std::string part; std::getline(stream, part, '.');) parts.push_back(part);
  return parts;
}

bool has(const std::vector<std::string>& parts, const char* part) {
  for (const auto& p : parts)
    if (p == part) return true;
  return false;
}

namespace {

std::string trim(const std::string& s) {
  size_t first = s.find_first_not_of(" \t\r\n"), last = s.find_last_not_of(" \t\r\n");
  return first == std::string::npos ? "" : s.substr(first, last - first + 1);
}

class Parser {
 public:
  std::unique_ptr<Program> program = std::make_unique<Program>();

  void run(const std::string& text) {
    std::stringstream stream(text);
    for (std::string line; std::getline(stream, line);) {
      line = trim(line.substr(0, line.find("//")));
      if (line.rfind(".loc", 0) == 0) {
        std::sscanf(line.c_str(), ".loc %d %d", &file_, &line_);
      } else if (line.rfind(".file", 0) == 0) {
        int number = std::atoi(line.c_str() + 5);
        size_t quote = line.find('"');
        program->files[number] = line.substr(quote + 1, line.rfind('"') - quote - 1);
      } else if (!ended_) {
        for (char c : line + "\n") take(c);
      }
    }
    if (program->name.empty()) throw Fault("no kernel in this PTX");
    program->slots = slots_;
  }

 private:
  struct Scope {
    std::map<std::string, int> names;                   // of registers, local ones with their slots
    std::map<std::string, int> labels;                  // positions
    std::vector<std::pair<int, std::string>> branches;  // not resolved: instruction, label
  };

  void take(char c) {
    if (depth_ == 0) {                                              // before the kernel's body
      if (c == '{' && statement_.find('=') == std::string::npos) {  // not what a constant is initialised with
        header(statement_);
        scopes_.emplace_back();
        depth_ = 1, statement_.clear();
      } else {
        statement_ += c;
        if (c == ';') statement_.clear();
      }
      return;
    }
    bool begins = trim(statement_).empty();
    if (c == '{' && begins) {
      scopes_.emplace_back(), ++depth_, statement_.clear();
    } else if (c == '}' && begins) {
      close();
    } else if (c == ';') {
      accept(trim(statement_)), statement_.clear();
    } else if (c == ':' && statement_.find_first_of(" \t,[") == std::string::npos && !begins &&
               statement_.find('.') == std::string::npos) {
      scopes_.back().labels[trim(statement_)] = int(program->instructions.size()), statement_.clear();
    } else if (!(begins && std::isspace(c))) {
      statement_ += c;
    }
  }

  void close() {
    Scope scope = std::move(scopes_.back());
    scopes_.pop_back();
    for (auto& [index, label] : scope.branches) {
      auto found = scope.labels.find(label);
      if (found != scope.labels.end()) program->instructions[index].target = found->second;
      else if (scopes_.empty()) throw Fault("no label " + label);
      else scopes_.back().branches.emplace_back(index, label);
    }
    if (--depth_ == 0) ended_ = true;
  }

  void header(const std::string& text) {
    size_t entry = text.find(".entry");
    if (entry == std::string::npos) throw Fault("only kernels are executed, no functions: " + text.substr(0, 200));
    size_t open = text.find('(', entry);
    program->name = trim(text.substr(entry + 6, open - entry - 6));
    std::stringstream list(text.substr(open + 1, text.find(')', open) - open - 1));
    int offset = 0;
    for (std::string one; std::getline(list, one, ',');) {
      std::stringstream words(one);
      std::string word, name;
      int bytes = 0, align = 0;
      while (words >> word) {
        if (word == ".align" && !bytes) words >> align;
        else if (word == ".align") words >> word;  // of what a pointer points to
        else if (word.size() > 2 && word[0] == '.' && std::isdigit(word[2])) bytes = std::atoi(word.c_str() + 2) / 8;
        else if (word[0] != '.') name = word;
      }
      size_t bracket = name.find('[');
      if (bracket != std::string::npos) bytes *= std::atoi(name.c_str() + bracket + 1), name = name.substr(0, bracket);
      else align = bytes;
      offset = (offset + align - 1) / align * align;
      program->parameters.push_back({name, offset, bytes});
      offset += bytes;
    }
    program->parameter_bytes = offset;
  }

  int slot(const std::string& name) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      auto found = scope->names.find(name);
      if (found != scope->names.end()) return found->second;
    }
    return scopes_.front().names[name] = slots_++;
  }

  int constant(uint64_t value) {
    auto [found, added] = constants_.try_emplace(value, slots_);
    if (added) program->constants.emplace_back(slots_++, value);
    return found->second;
  }

  int named(const std::string& name, std::vector<std::pair<int, std::string>>& list) {
    auto& names = scopes_.front().names;
    auto found = names.find(name);
    if (found != names.end()) return found->second;
    list.emplace_back(slots_, name);
    return names[name] = slots_++;
  }

  int value(const std::string& word) {
    static const char* SPECIAL[] = {"%tid",  "%ntid",  "%ctaid",       "%nctaid", "%laneid",  "%warpid",
                                    "%smid", "%nsmid", "%globaltimer", "%clock",  "%cluster", "%lanemask"};
    if (word[0] == '%') {
      for (const char* name : SPECIAL)
        if (word.rfind(name, 0) == 0) return named(word, program->special);
      return slot(word);
    }
    if (word.rfind("0f", 0) == 0 || word.rfind("0d", 0) == 0)
      return constant(std::strtoull(word.c_str() + 2, nullptr, 16));
    if (std::isdigit(word[0]) || word[0] == '-') return constant(std::strtoull(word.c_str(), nullptr, 0));
    for (const auto& scope : scopes_)
      if (scope.names.count(word)) return slot(word);
    if (word == "_") return slot(word);
    return named(word, program->symbols);
  }

  void declare(const std::string& text) {  // .reg .pred complete, p<3>
    std::string list = text.substr(text.find('.', 1) + 1);
    std::stringstream names(list.substr(list.find_first_of(" \t")));
    for (std::string name; std::getline(names, name, ',');) {
      name = trim(name);
      if (name.find('<') == std::string::npos) scopes_.back().names[name] = slots_++;
    }
  }

  void operands(const std::string& text, Instruction& i) {
    size_t at = 0;
    while (at < text.size()) {
      char c = text[at];
      if (std::isspace(c) || c == ',' || c == '[' || c == ']' || c == '{' || c == '}' || c == '|') {
        ++at;
        continue;
      }
      size_t end = text.find_first_of(" \t\n,[]{}|+", at + 1);
      if (end == std::string::npos) end = text.size();
      Operand operand{value(text.substr(at, end - at))};
      size_t plus = text.find_first_not_of(" \t\n", end);
      if (plus != std::string::npos && text[plus] == '+') {
        size_t number = text.find_first_not_of(" \t\n", plus + 1);
        end = text.find_first_of(" \t\n,]", number);
        operand.offset = std::strtoll(text.substr(number, end - number).c_str(), nullptr, 0);
      }
      i.args.push_back(operand);
      at = end;
    }
  }

  void accept(std::string text) {
    if (text.rfind(".reg", 0) == 0) return declare(text);
    if (text.empty() || text[0] == '.') return;  // .pragma
    Instruction i;
    i.text = text, i.file = file_, i.line = line_;
    if (text[0] == '@') {
      size_t end = text.find_first_of(" \t");
      i.negated = text[1] == '!';
      i.guard = value(text.substr(1 + i.negated, end - 1 - i.negated));
      text = trim(text.substr(end));
    }
    size_t end = text.find_first_of(" \t\n");
    std::string opcode = text.substr(0, end), rest = end == std::string::npos ? "" : text.substr(end);
    if (opcode == "bra" || opcode == "bra.uni") {
      scopes_.back().branches.emplace_back(int(program->instructions.size()), trim(rest));
    } else {
      operands(rest, i);
    }
    if (!control(opcode, i) && !memory(opcode, i) && !tensor_core(opcode, i) && !tensor_memory(opcode, i) &&
        !bulk_copy(opcode, i) && !conversion(opcode, i) && !bits(opcode, i) && !arithmetic(opcode, i))
      throw Fault("the emulator does not know: " + i.text);
    program->instructions.push_back(std::move(i));
  }

  std::string statement_;
  std::vector<Scope> scopes_;
  std::map<uint64_t, int> constants_;
  int depth_ = 0, slots_ = 0, file_ = 0, line_ = 0;
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<Program> parse(const std::string& text) {
  Parser parser;
  parser.run(text);
  return std::move(parser.program);
}

}  // namespace ptx
