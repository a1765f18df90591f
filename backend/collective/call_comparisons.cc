// How ranks find out that they have called different collectives: on a host by contracts in its memory, elsewhere by
// the marks of messages.
#include "backend/collective/communicator.h"
#include "backend/collective/program.h"

namespace farandole::collective {

void ProgramOperation::noteCalls() {
  CallHistory& history = communicator_->history_;
  for (const Contract& call : program_.noted_) history.add(call);
  program_.noted_.clear();
  mark_ = history.mark();
  numCalls_ = history.count();
}

Status ProgramOperation::compareContracts(const Program::Step& step) const {
  const auto& [turn, own] = program_.contracts_[step.firstSource];
  for (int index = 0; index < program_.host_->size(); ++index) {
    if (index == program_.host_->index() || (step.peer != Program::kAllRanks && step.peer != index)) continue;
    const Contract& other = program_.host_->contract(index, turn);
    if (other.isSameCall(own) && other.given == own.wanted && other.wanted == own.given) continue;
    const std::string who = communicator_->describe(communicator_->rankOnHost(index));
    if (!other.isSameCall(own)) {
      std::string text = step.kind == Program::Kind::kCompare ? "before this, " : "";
      text.append(communicator_->nameOf(communicator_->rank())).append(" called ").append(describe(own));
      text.append(", ").append(who).append(" called ").append(describe(other));
      return Status::invalidArgument(text + "; expected the same on all ranks");
    }
    if (other.given != own.wanted) return sizesDiffer(/*isSend=*/false, who, other.given, own.wanted);
    return sizesDiffer(/*isSend=*/true, who, other.wanted, own.given);
  }
  return Status::ok();
}

Status ProgramOperation::mismatch(const Message& message) {
  if (p2p::elementOf(message.tag) == mark_) return Operation::mismatch(message);
  std::string text;
  if (message.bytes != message.expectedBytes) text = Operation::mismatch(message).toString() + "; ";
  text += communicator_->describe(message.peer) + " has called other collectives than " +
          communicator_->nameOf(communicator_->rank());
  if (const std::string calls = describeCalls(); !calls.empty()) text += ", whose last ones are " + calls;
  return Status::invalidArgument(text + "; expected the same on all ranks, in the same order");
}

std::string ProgramOperation::describeReduction(std::uint16_t code) const {
  return "reduction " + std::to_string(code);
}

std::string ProgramOperation::describe(const Contract& contract) const {
  std::string text(toString(contract.kind));
  const bool hasRoot = contract.kind == CollectiveKind::kBroadcast || contract.kind == CollectiveKind::kReduce ||
                       contract.kind == CollectiveKind::kGather || contract.kind == CollectiveKind::kScatter;
  const bool reduces = contract.kind == CollectiveKind::kAllReduce || contract.kind == CollectiveKind::kReduce ||
                       contract.kind == CollectiveKind::kReduceScatter;
  if (contract.bytes > 0) text += " of " + std::to_string(contract.bytes) + " bytes";
  if (contract.longest > 0) text += " in parts of up to " + std::to_string(contract.longest);
  if (hasRoot) text += " with root " + std::to_string(contract.root);
  if (reduces) text += " (" + describeReduction(contract.reduction) + ")";
  return text;
}

std::string ProgramOperation::describeCalls() const {
  std::string text;
  for (const Contract& call : communicator_->history_.lastOf(numCalls_)) {
    text += (text.empty() ? "" : ", ") + describe(call);
  }
  return text;
}

std::string ProgramOperation::circumstances() const {
  const std::string calls = describeCalls();
  return calls.empty() ? "" : " (the last calls: " + calls + ")";
}

}  // namespace farandole::collective
